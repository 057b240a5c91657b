"""lib/measurement.py: intervals cover, bytes kept are counted once, and a commit says whether files differ from it."""

import subprocess

import numpy as np
import pytest
import torch

from lib.errors import UserError
from lib.measurement import commit, in_child, kept_bytes, median_time, of_medians, of_rounds, ratio_interval


def step_times(rng):
    """40 rounds of two step times that share the machine's slow moments. Their true ratio is 1.25."""
    slow = 1 + rng.exponential(0.3, 40)
    return slow * rng.normal(1, 0.02, 40), 1.25 * slow * rng.normal(1, 0.02, 40)


@pytest.mark.parametrize("of", [of_medians, of_rounds])
def test_the_interval_covers(of):
    rng, hits, trials = np.random.default_rng(1), 0, 60
    for _ in range(trials):
        ratio, low, high = ratio_interval(*step_times(rng), of, draws=500)
        assert low <= ratio <= high
        hits += low <= 1.25 <= high
    assert hits >= 0.88 * trials
    assert ratio_interval([2.0] * 5, [3.0] * 5, of) == (1.5, 1.5, 1.5)


def test_slow_moments_cancel_within_rounds():
    seconds = step_times(np.random.default_rng(2))
    widths = [high - low for _, low, high in (ratio_interval(*seconds, of) for of in (of_rounds, of_medians))]
    assert widths[0] < 0.5 * widths[1]


def test_a_median_leaves_the_first_runs_out(monkeypatch):
    monkeypatch.setattr("timeit.repeat", lambda function, number, repeat: [9.0, 9.0, 9.0, 1.0, 2.0, 3.0][:repeat])
    assert median_time(lambda: None, torch.device("cpu"), repeats=3) == 2.0


def test_kept_bytes():
    x, w = torch.randn(10, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert kept_bytes(lambda: x @ w) == 4 * (40 + 16)
    assert kept_bytes(lambda: x @ w, [w]) == 4 * 40
    assert kept_bytes(lambda: (x * x[:1]).sum()) == 4 * 40  # x and a view of it: one storage
    assert kept_bytes(lambda: (x @ w).exp().sin().sum(), [w]) == 4 * (40 + 40)  # x, and exp's result, once
    assert kept_bytes(lambda: x + 1) == 0


def test_a_childs_last_line_and_its_failure():
    assert in_child("-c", "print('a warning'); print('{\"a\": 1}')") == {"a": 1}
    with pytest.raises(UserError, match="ended with status 3: why$"):
        in_child("-c", "import sys; print('first\\nwhy', file=sys.stderr); sys.exit(3)")


def test_a_commit_and_whether_files_differ_from_it(tmp_path):
    assert commit(tmp_path) is None
    (tmp_path / "bench.py").touch()
    for words in (
        ["init", "-q"],
        ["add", "bench.py"],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"],
    ):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    clean = commit(tmp_path)
    (tmp_path / "bench.py").write_text("changed")
    assert len(clean) == 40 and commit(tmp_path) == f"{clean}+"
