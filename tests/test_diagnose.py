"""diagnose.py: what it finds, refuses, notes and reports, on run folders written by hand."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ENV, ROOT, write_folder
from matplotlib.figure import Figure
from toy_runs import MILESTONES, B, edit_config, random_gpt, record, write_run

import diagnose
from lib.errors import UserError
from lib.paired import t_interval


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    shards = {f"{split}_000000": rng.integers(0, 97, 2000) for split in ("train", "val")}
    return write_folder(tmp_path_factory.mktemp("data"), manifest=False, **shards)


@pytest.fixture(autouse=True)
def drawn_and_not_rendered(request, monkeypatch):
    """Figures are drawn, but rendered by test_a_whole_comparison alone: a rendering takes most of a second."""
    if "whole" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write(b"rendered"))


def run_diagnose(root, capsys, *flags):
    """(summary, text of report.md, standard output) of `diagnose.py root`."""
    diagnose.main([str(root), *flags])
    text = (root / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return summary, (root / "report.md").read_text(), capsys.readouterr().out


def write_pairs(root, data, seeds=3, **keys):
    """block and rd of some seeds -> {seed: (block, rd)} validation NLLs."""
    rng = np.random.default_rng(0)
    nlls = {}
    for seed in range(1, seeds + 1):
        block = np.array([5.0, 4.0, 3.5]) + rng.normal(0, 0.02, 3)
        nlls[seed] = block, block - 0.03 + rng.normal(0, 0.005, 3)
        for variant, values in zip(("block", "rd"), nlls[seed]):
            write_run(root, data, variant, seed, values.tolist(), test=values[-1] + 0.1, **keys)
    return nlls


def refusal(*words):
    """The one line that diagnose.py ends with."""
    with pytest.raises(UserError) as error:
        diagnose.main([str(word) for word in words])
    assert "\n" not in str(error.value)
    return str(error.value)


def one_with(text, notes):
    (note,) = (note for note in notes if text in note)
    return note


# ---- a whole comparison ----------------------------------------------------------------------------------------------

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def nlls():
    """{(variant, seed): validation NLLs}"""
    rng = np.random.default_rng(0)
    gaps = (("block", 0), ("rd", -0.03), ("q_k_v", 0.01), ("prenorm", 0.02))
    return {
        (variant, seed): np.array([5.0, 4.0, 3.5]) + gap + rng.normal(0, 0.005, 3)
        for seed in SEEDS
        for variant, gap in gaps
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, nlls):
    """A folder of 12 runs with checkpoints."""
    root = tmp_path_factory.mktemp("toy")
    for (variant, seed), values in nlls.items():
        write_run(root, data, variant, seed, values.tolist(), values[-1] + 0.1, random_gpt(variant, seed))
    return root


@pytest.mark.slow
def test_a_whole_comparison(whole, nlls, capsys):
    summary, report, out = run_diagnose(whole, capsys)
    assert [c["variant"] for c in summary["comparisons"]] == ["rd", "prenorm", "q_k_v"] and not summary["notes"]
    rd = summary["comparisons"][0]
    deltas = np.array([nlls["rd", seed] - nlls["block", seed] for seed in SEEDS])
    assert [pair["difference"] for pair in rd["pairs"]] == pytest.approx(deltas[:, -1])
    ends = [(nlls["block", seed][-1], nlls["rd", seed][-1]) for seed in SEEDS]
    assert [(pair["block"], pair["rd"]) for pair in rd["pairs"]] == ends
    assert rd["tokens"] == 8 * B and rd["wins"] == 3 and rd["sign_floor"] == 0.25
    assert rd["interval"] == pytest.approx(t_interval(deltas[:, -1]))
    assert [point["mean"] for point in rd["curve"]] == pytest.approx(deltas.mean(0))
    assert rd["test"]["mean"] == pytest.approx(deltas[:, -1].mean())
    row = next(row for row in summary["milestones"] if (row["tokens"], row["variant"]) == (4 * B, "block"))
    middle = [nlls["block", seed][1] for seed in SEEDS]
    assert (row["n"], row["mean"]) == (3, pytest.approx(np.mean(middle)))
    assert row["sd"] == pytest.approx(np.std(middle, ddof=1)) and len(summary["milestones"]) == 12

    assert set(summary["routes"]) == {"block", "rd", "q_k_v"} and summary["route_tokens"] == 124 * 16
    routes = summary["routes"]["rd"]
    assert (routes["n"], [run["seed"] for run in routes["runs"]]) == (3, [1, 2, 3])
    assert routes["profile"]["v"][0] == [1.0, None, None, None, None]  # NaN is not JSON
    assert summary["routes"]["q_k_v"]["of_q_and_v"] == ["q", "v"] and "js" not in summary["routes"]["block"]

    for name in ("curves.png", "routes.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in report and name in out
    for said in (report, out):
        assert f"{deltas[0, -1]:+.4f}" in said and "cannot give less than 0.25" in " ".join(said.split())
        assert f"Mean JS divergence of its QK and V routes {routes['js_over_layers']['mean']:.4f} nats" in said
        assert "results/" in said
    assert "report.md" in out and max(map(len, out.splitlines()[:-1])) <= 100

    before = {name: (whole / name).read_bytes() for name in ("report.md", "summary.json", "routes.png")}
    run_diagnose(whole, capsys)
    assert before == {name: (whole / name).read_bytes() for name in before}


def test_large_runs_are_not_called_noise(tmp_path, data, capsys):
    end = 80_000_000
    for variant, nll in (("block", 3.5), ("rd", 3.4)):
        path = write_run(tmp_path, data, variant, 1, [], max_tokens=end, milestones=(end,))
        (path / "metrics.jsonl").write_text(record("eval", end, val_nll=nll))
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert "noise" not in out + report and "at 80M tokens" in out
    assert one_with("one pair has neither", summary["notes"]) and "none for n = 1" in out


# ---- what may pair ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, value", [("lr", 1e-2), ("d_model", 16), ("data_id", "other"), ("max_tokens", 9 * B)])
def test_a_pair_must_agree(tmp_path, data, key, value):
    parent = write_run(tmp_path, data, "block", 1, [5, 4, 3.5])
    path = write_run(tmp_path, data, "rd", 1, [5, 4, 3.4], **{key: value})
    other = json.loads((parent / "config.json").read_text())[key]
    message = refusal(tmp_path)
    assert all(part in message for part in (key, repr(value), repr(other), str(path)))
    assert not (tmp_path / "report.md").exists()


def test_a_pair_may_differ_in_machine_keys(tmp_path, data, capsys):
    """And in which ones there are: a version of train.py may bring one or drop one."""
    parent = write_run(tmp_path, data, "block", 1, [5, 4, 3.5])
    path = write_run(tmp_path, data, "rd", 1, [5, 4, 3.4], device="cuda", micro_batch=3, stop_tokens=8 * B)
    edit_config(parent, remove=("reads", "checkpoint_minutes", "compile"), fused="auto", an_old_key=1)
    edit_config(path, remove=("fused",), reads="cpu", cpu="a processor", threads=2, a_new_key=[1])
    summary, *_ = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    assert summary["comparisons"][0]["n"] == 1 and not [note for note in summary["notes"] if "machines" in note]


def test_a_pair_on_two_machines_is_noted(tmp_path, data, capsys):
    write_pairs(tmp_path, data, 4)
    for path in tmp_path.glob("*-s*"):
        edit_config(path, cpu="Xeon", threads=1)
    for seed in (1, 3):
        edit_config(tmp_path / f"rd-s{seed}", cpu="EPYC")
    edit_config(tmp_path / "block-s2", threads=2)
    summary, report, out = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    said = [
        "block and rd of seed 1, 3 ran on different machines: cpu 'Xeon' and 'EPYC'.",
        "block and rd of seed 2 ran on different machines: threads 2 and 1.",
    ]
    assert len(summary["notes"]) == 2
    for note, start in zip(summary["notes"], said):
        assert note.startswith(start) and note in report and start in " ".join(out.split())


def test_runs_of_different_seeds_must_agree_too(tmp_path, data):
    write_pairs(tmp_path, data, 1)
    for variant in ("block", "rd"):
        write_run(tmp_path, data, variant, 2, [5, 4, 3], lr=1e-2)
    assert "lr is 0.0006 in the first and 0.01 in the second" in refusal(tmp_path)


def test_what_is_no_run(tmp_path, data, capsys):
    assert "no run here" in refusal(tmp_path)
    assert "is not a folder" in refusal(tmp_path / "absent")
    write_pairs(tmp_path / "a", data, 1)
    write_run(tmp_path / "b", data, "rd", 1, [5, 4, 3])
    assert "are both rd-s1" in refusal(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "stray").mkdir()
    (tmp_path / "a" / "stray" / "metrics.jsonl").write_text("")
    same_run_twice = str(tmp_path / "a" / "rd-s1")
    summary, _, out = run_diagnose(tmp_path / "a", capsys, same_run_twice)
    assert len(summary["runs"]) == 2 and one_with("stray has no config.json", summary["notes"])
    (tmp_path / "a" / "rd-s1" / "config.json").write_text("{}")
    assert "has no adam_eps, batch_tokens, betas and 25 other keys; train.py did not" in refusal(tmp_path / "a")


@pytest.mark.parametrize(
    "key, value",
    [
        ("milestones", None),
        ("milestones", ["x"]),
        ("milestones", "5"),
        ("stop_tokens", "x"),
        ("max_tokens", None),
        ("variant", 3),
        ("variant", ["rd"]),
        ("seed", "1"),
        ("seed", None),
        ("batch_tokens", 0),
        ("context", "a"),
        ("data_dir", 5),
        ("vocab_size", True),
    ],
)
def test_an_edited_config_is_named(tmp_path, data, key, value):
    edit_config(write_run(tmp_path, data, "block", 1, [5, 4, 3.5]), **{key: value})
    message = refusal(tmp_path)
    assert f"block-s1/config.json: config key {key}: " in message and "leave this folder out" in message


# ---- where the report goes -------------------------------------------------------------------------------------------


def test_single_runs_are_named_and_reported_beside(tmp_path, data):
    write_pairs(tmp_path, data, 2)
    diagnose.main([str(tmp_path / "block-s2"), str(tmp_path / "rd-s2")])
    assert len(json.loads((tmp_path / "summary.json").read_text())["runs"]) == 2
    diagnose.main([str(tmp_path / "block-s1"), str(tmp_path / "rd-s1"), "--out", str(tmp_path / "new" / "place")])
    assert (tmp_path / "new" / "place" / "report.md").exists()
    before = (tmp_path / "report.md").read_bytes()
    diagnose.main([str(tmp_path / "rd-s1")])  # one run alone: in its own folder, not over the report on all
    assert (tmp_path / "report.md").read_bytes() == before and (tmp_path / "rd-s1" / "report.md").exists()


# ---- runs that did not go as planned ---------------------------------------------------------------------------------


def test_a_stop_on_the_way_is_no_end(tmp_path, data):
    """A run that was stopped early, then sent on: its first test does not count, and it is still going."""
    stopped = record("test", 2 * B, test_nll=4.5)
    notes = []
    run = diagnose.read_run(write_run(tmp_path, data, "rd", 3, [5, 4], lines=[stopped]), notes)
    assert (run.status, run.test_nll) == ("unfinished", None) and one_with("rd-s3 is still going", notes)
    run = diagnose.read_run(write_run(tmp_path, data, "block", 3, [5, 4], test=3.0), notes)
    assert run.test_nll == 3.0
    run = diagnose.read_run(write_run(tmp_path, data, "rd", 4, [5, 4, 3], lines=[stopped]), notes)
    assert (run.status, run.test_nll) == ("finished", None)  # killed before its last test


def test_records_of_the_wrong_type_or_of_huge_losses(tmp_path, data, capsys):
    write_pairs(tmp_path, data, 2)
    with open(tmp_path / "rd-s1" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "eval", "step": 9, "tokens": "a", "val_nll": 5.0}\n')
        file.write(record("eval", MILESTONES[-1], val_nll=900.0))
    summary, *_ = run_diagnose(tmp_path, capsys)
    assert one_with("1 line(s)", summary["notes"])
    assert max(pair["difference"] for pair in summary["comparisons"][0]["pairs"]) > 890


def test_lengths_gaps_and_accidents(tmp_path, data, capsys):
    nlls = write_pairs(tmp_path, data, 5)
    going = '{"kind": "eval", "step": 2, "tokens": 2000, "val_nll": 5.0}\n'
    (tmp_path / "rd-s3" / "metrics.jsonl").write_text(going + '{"kind": "eval", "st')
    not_finite = '{"kind": "eval", "step": 4, "tokens": 4000, "val_nll": NaN}\n'
    diverged = '{"kind": "diverged", "step": 5, "tokens": 5000, "why": "loss nan"}\n'
    text = going + not_finite + "\xff\x00\n[1]\n" + diverged
    (tmp_path / "rd-s4" / "metrics.jsonl").write_text(text, encoding="latin-1")
    (tmp_path / "rd-s5" / "metrics.jsonl").unlink()
    write_run(tmp_path, data, "rd", 6, [5, 4, 3])
    write_run(tmp_path, data, "frozen_v", 2, [5.1, 4.1], stop_tokens=4 * B)
    write_run(tmp_path, data, "average", 7, [5, 4, 3])
    summary, report, out = run_diagnose(tmp_path, capsys)
    rd, frozen = summary["comparisons"]
    assert (rd["tokens"], [pair["seed"] for pair in rd["pairs"]]) == (8 * B, [1, 2])  # where the finished pairs ended
    assert [point["n"] for point in rd["curve"]] == [4, 2, 2]
    assert (frozen["tokens"], frozen["n"]) == (4 * B, 1) and frozen["mean"] == pytest.approx(4.1 - nlls[2][0][1])
    status = {f"{run['variant']}-s{run['seed']}": run["status"] for run in summary["runs"]}
    assert [status[name] for name in ("rd-s1", "rd-s3", "rd-s4")] == ["finished", "unfinished", "diverged"]
    assert status["frozen_v-s2"] == "finished"
    for said in (
        "rd-s3: 1 line(s)",
        "rd-s3 is still going",
        "rd-s4: 3 line(s)",
        "rd-s4 diverged at step 5 (loss nan): it counts up to 2k tokens",
        "rd-s5 is still going, or was stopped short of its 8k tokens: it has no evaluation",
        "rd-s6 has no block-s6",
        "3 of 5 pairs have no evaluation at 8k tokens",
        "frozen_v: one pair has neither",
        "average is not compared",
        "rd-s1: has no checkpoint",
    ):
        assert any(said in note for note in summary["notes"]), said
        assert said in report and said in " ".join(out.split()), said
    assert "routes.png" not in report and not (tmp_path / "routes.png").exists()


def test_runs_that_are_all_going_are_compared_where_most_are(tmp_path, data, capsys):
    for variant, gap in (("block", 0), ("rd", -0.1)):
        for seed, length in ((1, 2), (2, 1), (3, 2)):
            nlls = [5 + gap, 4 + gap][:length]
            write_run(tmp_path, data, variant, seed, nlls, milestones=(2 * B - 1, 3 * B + 1, 8 * B))
    write_run(tmp_path, data, "prenorm", 1, [])
    summary, *_ = run_diagnose(tmp_path, capsys)
    (rd,) = summary["comparisons"]
    assert (rd["tokens"], rd["n"]) == (2 * B, 3) and rd["mean"] == pytest.approx(-0.1)
    counts = [(row["tokens"], row["variant"], row["n"]) for row in summary["milestones"]]
    assert counts == [(2 * B, "block", 3), (2 * B, "rd", 3), (4 * B, "block", 2), (4 * B, "rd", 2)]


def test_milestones_are_the_ends_of_their_updates(tmp_path, data):
    path = write_run(tmp_path, data, "rd", 1, [5, 4, 3.5], milestones=(2 * B - 1, 3 * B, 8 * B))
    rows = diagnose.milestone_table([diagnose.read_run(path, [])])
    # 3B was not evaluated, 4B is no milestone
    assert [(row["tokens"], row["mean"]) for row in rows] == [(2 * B, 5), (8 * B, 3.5)]


def test_equal_differences_are_said(tmp_path, data, capsys):
    for seed in SEEDS:
        for variant in ("block", "tied"):
            write_run(tmp_path, data, variant, seed, [5, 4, 3 + seed / 100])
    summary, report, out = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    assert one_with("sd 0", summary["notes"])
    assert "Lower in 0 of 3 pairs and equal in 3" in out and "without a sign" in " ".join(out.split())
    assert summary["comparisons"][0]["interval"] == [0, 0]


def test_one_variant_alone(tmp_path, data, capsys):
    assert "--route_tokens: -5 must be 0" in refusal(tmp_path, "--route_tokens=-5")
    write_run(tmp_path, data, "rd", 1, [5, 4, 3], checkpoint=random_gpt("rd"))
    assert "--device: 'abacus' is none of auto, cpu" in refusal(tmp_path, "--device=abacus")
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert summary["comparisons"] == [] and one_with("Nothing is paired", summary["notes"])
    assert summary["routes"]["rd"]["n"] == 1 and (tmp_path / "curves.png").exists()


def test_no_evaluation_at_all(tmp_path, data, capsys):
    for variant in ("block", "rd"):
        write_run(tmp_path, data, variant, 1, [])
    summary, report, out = run_diagnose(tmp_path, capsys, "--route_tokens=0")
    assert summary["comparisons"] == [] == summary["milestones"] and not (tmp_path / "curves.png").exists()
    assert "rd is not compared" in out


# ---- routes that cannot be measured ----------------------------------------------------------------------------------


def test_checkpoints_that_cannot_be_read(tmp_path, data, capsys):
    fine, broken = random_gpt("rd"), random_gpt("rd")
    with torch.no_grad():
        broken.layers[1].attn_read.query[0] = math.nan
    write_run(tmp_path, data, "rd", 1, [5, 4, 3], checkpoint=fine)
    write_run(tmp_path, data, "rd", 2, [5, 4], checkpoint=fine)
    write_run(tmp_path, data, "rd", 3, [5, 4, 3], checkpoint=broken)
    write_run(tmp_path, data, "rd", 4, [5, 4, 3], checkpoint=random_gpt("rd", d_model=16))
    damaged = write_run(tmp_path, data, "rd", 5, [5, 4, 3], checkpoint=fine) / "ckpt.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    summary, report, out = run_diagnose(tmp_path, capsys)
    assert summary["routes"]["rd"]["n"] == 1 and summary["routes"]["rd"]["js_over_layers"]["interval"] is None
    for said in (
        "rd-s2: its routes are left out: its checkpoint is at step 2",
        "rd-s3: its routes are not measured: its checkpoint holds values",
        "rd-s4/ckpt.pt does not fit model.py",
        "rd-s5: has no checkpoint",
    ):
        assert said in report, said


def test_data_that_is_absent_or_another(tmp_path, data, capsys):
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    for path in data.glob("*.bin"):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    edit_config(write_run(tmp_path / "x", data, "rd", 1, [5, 4, 3], checkpoint=random_gpt("rd")), data_dir="data/gone")
    summary, *_ = run_diagnose(tmp_path / "x", capsys)
    assert summary["routes"] == {} and "--data_dir" in one_with("data/gone", summary["notes"])
    summary, *_ = run_diagnose(tmp_path / "x", capsys, f"--data_dir={elsewhere}")
    assert summary["routes"]["rd"]["n"] == 1
    path = elsewhere / "val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    summary, *_ = run_diagnose(tmp_path / "x", capsys, f"--data_dir={elsewhere}")
    assert summary["routes"] == {} and one_with("other data", summary["notes"])


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path):
    def command(*words):
        return subprocess.run([sys.executable, *words], cwd=ROOT, env=ENV, capture_output=True, text=True)

    heavy = "{'torch', 'matplotlib', 'scipy'}"
    done = command("-c", f"import sys, diagnose; sys.exit(str({heavy} & sys.modules.keys() or ''))")
    assert done.stderr.strip() == "", "--help must not wait for these"
    done = command("diagnose.py", str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
