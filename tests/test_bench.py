"""bench.py runs end to end at a tiny size, names mistakes, and steps as train.py does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ENV, ROOT, write_folder

import bench
from lib.errors import UserError
from lib.measurement import commit
from model import GPT, ModelConfig

TINY = """--n_layer=2 --d_model=16 --n_head=2 --d_mlp=24 --n_blocks=2 --context=16 --micro_batch=2 --batch_tokens=64
    --vocab_size=50 --device=cpu --compile=false --data_dir=nowhere""".split()  # two passes an update
CPU = torch.device("cpu")


def config_of(*flags):
    return bench.parse([*TINY, *flags])[1]


def run(*flags):
    """bench.py in this process, at the tiny size."""
    argv = [*TINY, *flags]
    return bench.main(*bench.parse(argv), argv)


@pytest.fixture
def no_child(monkeypatch):
    """Processes of their own have a test of their own."""
    monkeypatch.setattr(bench, "child", lambda *_: {"rss": 300 * 2**20, "compile_s": 1.5})


def test_end_to_end(tmp_path, capsys, no_child):
    path = tmp_path / "new folder" / "b.json"
    assert run("--rounds=2", "--warmup=1", "--variants=plain,prenorm,block,rd", "--reads=plain", f"--json={path}") == 0
    report = json.loads(path.read_text())
    keys = {"name", "device", "versions", "config", "options", "rows", "ratios", "reads", "copy_bytes_per_s", "loader"}
    assert keys == report.keys()
    assert [row["variant"] for row in report["rows"]] == ["plain", "prenorm", "block", "rd"]
    assert [row["reads"] for row in report["rows"]] == [None, None, "plain", "plain"]
    for row in report["rows"]:
        assert row["step_ms"] > 0 and len(row["step_ms_all"]) == 2 and row["saved_bytes"] > 0
        assert row["tokens_per_s"] == pytest.approx(64e3 / row["step_ms"])
        assert row["compile_s"] is row["cached_compile_s"] is row["cuda_peak_bytes"] is row["mfu"] is None
        assert row["peak_rss_bytes"] == 300 * 2**20
    assert [r["pair"] for r in report["ratios"]] == ["rd/block", "block/prenorm", "rd/prenorm", "prenorm/plain"]
    for r in report["ratios"]:
        assert 0 < r["low"] <= r["ratio"] <= r["high"] and r["of_rounds"][1] <= r["of_rounds"][0] <= r["of_rounds"][2]
        assert (r["best"] is None) == (r["pair"] == "prenorm/plain")
    for read in report["reads"]:
        assert min(read[f"{key}_ms"] for key in ("ours", "stacked", "copy")) > 0 and read["K"] == 3
        assert read["ours_kept_bytes"] > 0 and read["stacked_kept_bytes"] > 0
    assert report["config"]["vocab_size"] == 50 and report["loader"] is None
    assert report["device"]["cpu"] and report["versions"]["commit"] == commit(ROOT)
    assert [path.name for path in path.parent.iterdir()] == ["b.json"]
    shown = capsys.readouterr().out
    assert "rd/block" in shown and max(map(len, shown.splitlines())) <= 100


def test_a_table_with_every_column_has_100_columns():
    row = dict(variant="prenorm", reads=None, step_ms=1234.5, step_ms_quartiles=[1234.5, 1250.3], tokens_per_s=123456.0)
    row |= dict(saved_bytes=9e9, cuda_peak_bytes=9e10, compile_s=139.0, cached_compile_s=12.0, mfu=0.4)
    ratio = dict(pair="rd:plain/block:plain", ratio=1.0, low=1.0, high=1.0, of_rounds=[1.0, 1.0, 1.0], best=1.0)
    read = dict(variant="rd:plain", reads="plain", K=9, ours_ms=1e3, stacked_ms=1e3, copy_ms=1e3)
    read |= dict(ours_kept_bytes=9e9, stacked_kept_bytes=9e9)
    config, loader = vars(config_of()), dict(ms=1.0, share=0.5)
    here = dict(name="NVIDIA H100 80GB HBM3", compiled=True, threads=16, load_average=1.0)
    report = dict(name="bench", rows=[row], ratios=[ratio], reads=[read], config=config, device=here, loader=loader)
    report |= dict(copy_bytes_per_s=1e12, versions=dict(torch="2.13.0+cu130"), options=dict(clock="wall"))
    lines = bench.table(report).splitlines()
    assert max(map(len, lines)) <= 100 and "cached s" in lines[3] and "50.00 % of a step" in lines[-1]


def test_names_with_a_backend_are_entrants_of_their_own(tmp_path, capsys, no_child):
    path = tmp_path / "b.json"
    words = ["--rounds=2", "--warmup=1", "--variants=rd:plain,rd:cpu,block:plain,prenorm"]
    assert run(*words, f"--json={path}") == 0
    report = json.loads(path.read_text())
    reads = [("rd:plain", "plain"), ("rd:cpu", "cpu"), ("block:plain", "plain")]
    assert [(row["variant"], row["reads"]) for row in report["rows"]] == [*reads, ("prenorm", None)]
    assert [(row["variant"], row["reads"]) for row in report["reads"]] == reads
    over_prenorm = [f"{name}/prenorm" for name, _ in reads]
    assert [r["pair"] for r in report["ratios"]] == ["rd:plain/block:plain", *over_prenorm, "rd:cpu/rd:plain"]
    assert report["ratios"][-1]["best"] is None  # the same bytes


def test_without_a_c_compiler_the_row_says_that_reads_are_plain(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    entrants = bench.enter(["prenorm", "block", "rd"], bench.settle(config_of("--d_model=24"))[0], CPU, False)
    assert [e.reads for e in entrants] == [None, "plain", "plain"]
    assert "needs a C compiler" in capsys.readouterr().err


def test_the_loader_is_timed_where_there_is_data(tmp_path):
    write_folder(tmp_path, train_000000=[1] * 200, val_000000=[1] * 40, vocab_size=50)
    config, device, _ = bench.settle(config_of(f"--data_dir={tmp_path}"))
    found = bench.time_loader(config, device, 0.5)
    assert found["ms"] > 0 and found["share"] == pytest.approx(found["ms"] / 500)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--variants=rd,blokc"], "'blokc' is none of plain, prenorm, block"),
        (["--variants=rd:gpu"], "config key reads: 'gpu' is none of"),
        (["--variants=prenorm:cpu"], "prenorm has no depth reads"),
        (["--variants=plain:cpu"], "plain has no depth reads"),
        (["--variant=rd"], "--variants=prenorm,block,rd"),
        (["--round=3"], "unknown key 'round'"),
        (["--scaling=here"], "unknown key 'scaling'"),
        (["--rounds=1"], "--rounds=1 must be"),
        (["--warmup=0"], "--warmup=0 1 or more"),
        (["--rounds=many"], "--rounds: invalid int"),
        (["--json"], "--json: expected one argument"),
        (["--clock=sun"], "invalid choice: 'sun'"),
        (["--batch_tokens=65"], "batch_tokens: 65 is not a multiple"),
        (["--n_head=3"], "n_head = 3"),
        (["--n_blocks=3"], "n_blocks = 3"),
        (["absent.toml"], "absent.toml"),
    ],
)
def test_a_mistake_is_named(flags, words):
    argv = [*flags, *TINY] if flags == ["absent.toml"] else [*TINY, *flags]
    with pytest.raises(UserError) as caught:
        bench.main(*bench.parse(argv), argv)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_is_one_line():
    done = subprocess.run([sys.executable, ROOT / "bench.py", "--round=3"], capture_output=True, text=True, env=ENV)
    assert (done.returncode, done.stdout) == (2, "") and "unknown key 'round'" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_help_has_bench_pys_options_and_train_pys_keys(capsys):
    with pytest.raises(SystemExit) as caught:
        bench.parse(["--help"])
    shown = capsys.readouterr().out
    assert not caught.value.code and "--variants" in shown and "--reads" in shown and "--child" not in shown


@pytest.mark.slow
def test_a_child_measures_itself():
    found = bench.child(TINY, "rd")
    assert math.isfinite(found["compile_s"])
    assert 50e6 < found["rss"] < 5e9 if Path("/proc").exists() else found["rss"] is None


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)
def test_variants_compile_side_by_side(tmp_path, monkeypatch, no_child):
    """More of them than torch._dynamo's limit would allow. Both compile times are in the rows."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_with(*args, **options, backend="eager"))
    monkeypatch.setattr(bench, "pick_compile", lambda config, device: True)
    path = tmp_path / "b.json"
    sizes = ["--n_layer=1", "--n_blocks=1", "--rounds=2", "--warmup=1"]
    assert run(*sizes, "--cached", "--variants=plain,prenorm,rd:plain,rd:cpu", f"--json={path}") == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(row["compile_s"] and row["cached_compile_s"] == 1.5 for row in rows)
    assert all(row["peak_rss_bytes"] is None for row in rows)


def model_config(config, variant):
    names = ("vocab_size", "n_layer", "n_head", "d_model", "d_mlp", "context", "n_blocks")
    return ModelConfig(**{name: getattr(config, name) for name in names}, variant=variant)


def test_flops():
    config = config_of()
    model = GPT(model_config(config, "block"))
    matrices = 64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24)  # the head; qkv, out, gate_up, down of two layers
    assert bench.flops_a_token(config, model) == 6 * matrices + 12 * 2 * 16 * 16
    assert bench.peak_flops(config, CPU) is None


def test_one_step_is_trains():
    """The weights after one update over two passes equal a plain AdamW step on the mean gradient, clipped."""
    config, device, _ = bench.settle(config_of("--dtype=float64", "--grad_clip=0.1"))
    entrant, plain = (bench.Entrant("rd", config, device, False) for _ in range(2))
    entrant.step()
    idx, targets = (torch.cat(parts) for parts in zip(*plain.batches))
    plain.model(idx, targets)[1].backward()
    gradients = [p.grad for p in plain.model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert norm > 0.1
    for g in gradients:
        g.mul_(0.1 / norm)
    plain.optimizer.step()
    for (name, got), expected in zip(entrant.model.named_parameters(), plain.model.parameters()):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("name", ["bench", "xs"])
def test_configs_fit_train(name):
    """Updates and milestones are whole numbers of each other, and the model builds."""
    config = bench.parse([str(ROOT / "configs" / f"{name}.toml")])[1]
    assert config.batch_tokens % (config.micro_batch * config.context) == 0
    assert all(
        tokens % config.batch_tokens == 0 for tokens in (config.max_tokens, config.warmup_tokens, *config.milestones)
    )
    assert config.milestones[-1] == config.max_tokens
    GPT(model_config(config, "rd"))
