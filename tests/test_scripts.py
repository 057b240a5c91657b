"""runs/pairs.sh, sample.py and the output of scripts, as a user calls them."""

import dataclasses
import json
import os
import platform
import subprocess
import sys

import pytest
import torch
from helpers import ENV, ROOT
from tiny_runs import config_for, run

import sample
from lib.errors import UserError
from lib.run_folder import load_run

pytestmark = pytest.mark.usefixtures("leave_no_trace")


PYTHON = os.path.dirname(sys.executable)


def pairs(*words, python=PYTHON, **env):
    """runs/pairs.sh, whose `python` is the one in the folder `python`."""
    env = {**ENV, "PATH": f"{python}:{os.environ['PATH']}", **env}
    return subprocess.run([ROOT / "runs/pairs.sh", *words], env=env, capture_output=True, text=True, timeout=240)


DEMO = "configs/demo.toml"


@pytest.mark.parametrize(
    "words, env",
    [
        ([DEMO, "rd"], {}),
        ([DEMO, "rd", ""], {}),
        ([DEMO, "", "1"], {}),
        ([DEMO, "\t", "1"], {}),
        (["nowhere.toml", "rd", "1"], {}),
        (["--device=cpu", "rd", "1"], {}),
        ([DEMO, "rd", "1"], {"JOBS": "0"}),
        ([DEMO, "rd", "1"], {"JOBS": "many"}),
        ([DEMO, "rd", "1"], {"NPROC": "x"}),
        ([DEMO, "rd", "1", "--out-dir=x"], {}),
        ([DEMO, "rd", "1", "--seed=2"], {}),
        ([DEMO, "rd", "1", "--variant", "block"], {}),
    ],
)
def test_pairs_refuses_what_it_cannot_do(words, env, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = pairs(*words, **env)
    assert result.returncode == 2 and result.stderr and not result.stdout


def stub(tmp, script):
    """A folder whose `python` is this shell script."""
    path = tmp / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return tmp


def test_a_star_is_a_word_and_no_list_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = pairs(DEMO, "nope *", "1", python=stub(tmp_path, 'echo "$3"'))
    assert result.stdout.splitlines() == [
        "run 1 of 2: nope, seed 1",
        "--variant=nope",
        "run 2 of 2: *, seed 1",
        "--variant=*",
    ]


STEPS = """
import resource
import numpy as np

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [np.ones(2**18) for _ in range(32)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(step() for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another one")
def test_a_step_of_a_pairs_runs_pays_for_no_page_that_the_step_before_had(tmp_path, monkeypatch):
    """64 MiB, in pages of 4 KiB or of 2 MiB: by pairs.sh's thresholds, and by a user's, which it leaves alone."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "steps.py").write_text(STEPS)
    python = stub(tmp_path, f"exec {sys.executable} {tmp_path / 'steps.py'}")
    faults = []
    for env in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}):
        result = pairs(DEMO, "rd", "1", python=python, **env)
        faults.append(int(result.stdout.splitlines()[-1]))
    assert 10 * faults[0] + 10 < faults[1], faults


@pytest.mark.slow
def test_pairs_trains_each_run_once_side_by_side_and_reports_a_failure(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.asdict(config_for(data, "", max_tokens=512, milestones=()))
    lines = [
        f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}\n"
        for name, value in config.items()
        if name not in ("variant", "seed", "out_dir") and value != ()
    ]
    (tmp_path / "tiny.toml").write_text("".join(lines))

    def files():
        return {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    first = pairs("tiny.toml", "block rd", "1", JOBS="2")
    assert first.returncode == 0, first.stderr
    folders = sorted(path.name for path in (tmp_path / "out" / "tiny").iterdir())
    assert folders == ["block-s1", "rd-s1"] and "run 2 of 2: rd, seed 1" in first.stdout
    before = files()
    again = pairs("tiny.toml", "block nope", "1")
    assert again.returncode == 2 and "block-s1: finished" in again.stdout
    assert "variant 'nope' is none of" in again.stderr and files() == before


class SmallTokenizer:
    """The tests' vocabulary is smaller than any real tokenizer's."""

    eot_token = 1
    encode_ordinary = staticmethod(lambda text: [ord(letter) % 40 for letter in text])
    decode = staticmethod(lambda ids: " ".join(map(str, ids)))


def test_sample_continues_a_prompt_the_same_way_for_the_same_seed(data, tmp_path, capsys, monkeypatch):
    out = run(data, tmp_path / "out", dtype="float32").out
    monkeypatch.setattr(sample, "get_tokenizer", lambda name: SmallTokenizer)
    capsys.readouterr()
    said = []
    for extra in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"]):
        sample.main([str(out), "--prompt", "ab", "--tokens", "5", *extra])
        said.append(capsys.readouterr().out.split())
    assert said[0] == said[1] != said[2] and all(len(words) == 7 for words in said)  # the prompt and five more
    idx = torch.tensor([[1, *SmallTokenizer.encode_ordinary("ab")]])
    assert said[3] == [str(token) for token in load_run(out)[0].generate(idx, 5, temperature=0)[0, 1:].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell, status, error",
    [("> /dev/full", 2, "error: cannot write the output: No space left on device\n"), ("| true", 1, "")],
)
def test_output_that_nobody_takes_is_no_traceback(data, tmp_path, shell, status, error):
    run(data, tmp_path, max_tokens=256, warmup_tokens=0, milestones=())
    diagnose = f"{sys.executable} {ROOT / 'diagnose.py'} {tmp_path} --route_tokens=0"
    command = f"{diagnose} {shell}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=ENV, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize(
    "words", ["", "--tokens 0", "--device abacus", "--device cuda:99", f"--seed {2**64}", "--seed -1"]
)
def test_sample_says_what_is_wrong_in_one_line(words):
    with pytest.raises(UserError) as error:
        sample.main(["nowhere", *words.split()])
    assert "\n" not in str(error.value)
