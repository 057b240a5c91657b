"""bench.py counts and compares rightly: bytes kept, bytes that reads move, intervals; and it runs end to end at a tiny size."""
import copy
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
from lib.config import TrainConfig
from lib.errors import UserError
import fused
from model import GPT, DepthRead, ModelConfig, RMSNorm, Source, inverse_rms, read_finished, wide
from helpers import ENV, ROOT, write_folder

TINY = ["--n_layer=2", "--d_model=16", "--n_head=2", "--d_mlp=24", "--n_blocks=2", "--context=16", "--micro_batch=2", "--batch_tokens=64",
        "--vocab_size=50", "--device=cpu", "--compile=false"]  # two passes an update


def config_of(*flags):
    return bench.parse([*TINY, "--data_dir=nowhere", *flags])[1]


def run(*flags):
    """bench.py in this process, at the tiny size."""
    argv = [*TINY, *flags]
    return bench.main(*bench.parse(argv), argv)


def test_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "child", lambda *_: {"rss": 300 * 2**20})  # its own test starts the process
    path = tmp_path / "new folder" / "b.json"
    assert run("--data_dir=nowhere", "--rounds=2", "--warmup=1", "--variants=plain,prenorm,block,rd", f"--json={path}") == 0
    report = json.loads(path.read_text())
    assert {"name", "device", "versions", "config", "options", "rows", "ratios", "reads", "copy_bytes_per_s", "loader"} <= report.keys()
    assert [row["variant"] for row in report["rows"]] == ["plain", "prenorm", "block", "rd"]
    for row in report["rows"]:
        assert row["step_ms"] > 0 and len(row["step_ms_all"]) == 2 and row["saved_bytes"] > 0
        assert row["tokens_per_s"] == pytest.approx(64e3 / row["step_ms"])
        assert row["compile_s"] is None and row["cuda_peak_bytes"] is None and row["mfu"] is None
        assert row["peak_rss_bytes"] == 300 * 2**20
    assert [r["pair"] for r in report["ratios"]] == ["rd/block", "block/prenorm", "rd/prenorm", "prenorm/plain"]
    for r in report["ratios"]:
        assert 0 < r["low"] <= r["ratio"] <= r["high"] and r["of_rounds"][1] <= r["of_rounds"][0] <= r["of_rounds"][2]
    assert report["config"]["vocab_size"] == 50 and report["loader"] is None
    assert report["device"]["cpu"] and report["versions"]["commit"] == bench.commit()
    assert [path.name for path in path.parent.iterdir()] == ["b.json"]
    shown = capsys.readouterr().out
    assert "rd/block" in shown and max(map(len, shown.splitlines())) <= 100


def test_why_there_is_no_kernel_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(bench, "child", lambda *_: {"rss": None})
    monkeypatch.setenv("CC", "no-such-compiler")
    bench.fused.library.cache_clear()
    assert run("--data_dir=nowhere", "--rounds=2", "--warmup=1", "--variants=prenorm,block,rd") == 0
    shown = capsys.readouterr()
    assert shown.err.count("fused.c needs a C compiler") == 1 and "reads by fused.c" not in shown.out


def test_a_commit_and_whether_files_differ_from_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    assert bench.commit() is None
    (tmp_path / "bench.py").touch()
    for words in (["init", "-q"], ["add", "bench.py"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    clean = bench.commit()
    (tmp_path / "bench.py").write_text("changed")
    assert len(clean) == 40 and bench.commit() == f"{clean}+"


def test_the_loader_is_timed_where_there_is_data(tmp_path):
    write_folder(tmp_path, train_000000=[1] * 200, val_000000=[1] * 40, vocab_size=50)
    config = bench.settle(config_of(f"--data_dir={tmp_path}"), torch.device("cpu"))
    found = bench.time_loader(config, torch.device("cpu"), 0.5)
    assert found["ms"] > 0 and found["share"] == pytest.approx(found["ms"] / 500)


@pytest.mark.parametrize("flags, words", [
    (["--variants=rd,blokc"], "'blokc' is none of plain, prenorm, block"), (["--variant=rd"], "--variants=prenorm,block,rd"), (["--round=3"], "unknown key 'round'"),
    (["--rounds=1"], "--rounds=1 must be"), (["--rounds=many"], "--rounds: invalid int"), (["--json"], "--json: expected one argument"),
    (["--clock=sun"], "invalid choice: 'sun'"), (["--batch_tokens=65"], "batch_tokens: 65 is not a multiple"), (["--n_head=3"], "n_head = 3"),
    (["--n_blocks=3"], "n_blocks = 3"), (["absent.toml"], "absent.toml"),
])  # fmt: skip
def test_a_mistake_is_named(flags, words):
    with pytest.raises(UserError) as caught:
        argv = [*flags[: flags[0].endswith("toml")], *TINY, "--data_dir=nowhere", *flags[flags[0].endswith("toml") :]]
        bench.main(*bench.parse(argv), argv)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_is_one_line():
    done = subprocess.run([sys.executable, ROOT / "bench.py", "--round=3"], capture_output=True, text=True, env=ENV)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: command line: unknown key 'round'; see train.py --help\n")


def test_resident_memory_of_a_child():
    options, _, _ = bench.parse(TINY)
    found = bench.child(options, [*TINY, "--data_dir=nowhere"], "rd", "rss")["rss"]
    assert found is None if not Path("/proc").exists() else 50e6 < found < 5e9


def test_saved_bytes():
    x, w = torch.randn(10, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert bench.saved_bytes(lambda: x @ w) == 4 * (40 + 16)
    assert bench.saved_bytes(lambda: x @ w, [w]) == 4 * 40
    assert bench.saved_bytes(lambda: (x * x[:1]).sum()) == 4 * 40  # x and a view of it: one storage
    assert bench.saved_bytes(lambda: (x @ w).exp().sin().sum(), [w]) == 4 * (40 + 40)  # x and exp's result, which sin keeps too
    assert bench.saved_bytes(lambda: x + 1) == 0


def test_read_bytes_against_a_hand_count():
    # forward: 3 sources in, 2 mixtures out; backward: 3 sources and 2 gradients in, 3 gradients out: 13 of 2 x 5 x 7 x 4 bytes
    assert bench.read_bytes(3, 2, 2, 5, 7, 4) == 13 * 280
    config = config_of()  # L 2, N 2, S 2: attention b0; MLP b0, p; attention b0, b1; MLP b0, b1, p; final b0, b1, b2
    assert bench.reads(config, "rd") == [(1, 2), (2, 1), (2, 2), (3, 1), (3, 1)]
    assert bench.reads(config, "prenorm") == [(1, 0)] * 5
    assert bench.step_bytes(config, "rd", 4) == (3 * (1 + 2 + 2 + 3 + 3) + 2 * 7) * 64 * 16 * 4  # batch_tokens 64, D 16, float32
    assert bench.step_bytes(config, "rd", 4) - bench.step_bytes(config, "block", 4) == 2 * 2 * 64 * 16 * 4  # one more route in two layers


@pytest.mark.parametrize("L, N, variant", [(3, 6, "rd"), (3, 2, "q_k_v"), (3, 1, "block"), (4, 2, "rd")])
def test_reads_are_the_models(L, N, variant):
    sizes = dict(vocab_size=50, n_layer=L, n_head=2, d_model=16, d_mlp=24, context=16, n_blocks=N)
    routes = GPT(ModelConfig(variant=variant, **sizes)).routes(torch.zeros(1, 4, dtype=torch.long))
    expected = []
    for layer in routes:
        attention = [alphas.shape[0] for group, alphas in layer.items() if group not in ("mlp", "final")]
        expected += [(attention[0], len(attention))] if attention else []
        expected += [(alphas.shape[0], 1) for group, alphas in layer.items() if group in ("mlp", "final")]
    assert bench.reads(config_of(f"--n_layer={L}", f"--n_blocks={N}"), variant) == expected


def test_the_stacked_read_is_the_same_read():
    read = DepthRead(ModelConfig(vocab_size=50, n_head=2, d_model=16, variant="rd"), ("qk", "v")).double()
    for parameter in read.parameters():
        torch.nn.init.normal_(parameter)
    states = [torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    norm = RMSNorm(ModelConfig(d_model=16, n_head=2)).double()
    inputs, gradients = [*states, *read.parameters(), norm.weight], [torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(2)]
    ours, stacked = bench.our_read(read, norm, states), bench.stacked_read(read, norm, states)
    torch.testing.assert_close(ours, stacked, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, gradients), torch.autograd.grad(stacked, inputs, gradients), rtol=1e-9, atol=1e-9)


def whole_read(read, norm, states):
    """Both phases: the last state as the running sum; the read is the second of its block."""
    *finished, running = [Source(s, inverse_rms(wide(s.detach()), read.key_norm.eps)) for s in states]
    return read(read_finished(finished, [read, read], norm)[0][1], running, norm)[0]


def plain_read(read, norm, states):
    """One softmax over all states, by autograd, in float32 from the states on; the norm of the mixture, in the states' dtype."""
    mixtures = []
    for name in read.queries:
        direction = wide(read.key_norm.weight) * wide(getattr(read, name))
        logits = torch.stack([(wide(s) * direction).sum(-1) * inverse_rms(wide(s), read.key_norm.eps)[..., 0] for s in states])
        mixtures.append(norm(sum(alpha[..., None] * wide(s) for alpha, s in zip(logits.softmax(0), states))).to(states[0].dtype))
    return mixtures


def errors_in_bf16(function, seed):
    """Relative errors, in the 2-norm, of mixtures and of gradients of one bf16 read against the same numbers in float64."""
    torch.manual_seed(seed)
    read = DepthRead(ModelConfig(vocab_size=50, n_head=2, d_model=64, variant="rd"), ("qk", "v"))
    norm = RMSNorm(ModelConfig(n_head=2, d_model=64))
    for parameter in (*read.parameters(), norm.weight):
        torch.nn.init.normal_(parameter, std=0.5)
    states = [(torch.randn(2, 33, 64) * 2.0**k).bfloat16() for k in range(5)]
    gradients = [torch.randn(2, 33, 64).bfloat16().double() for _ in range(2)]
    results = []
    for dtype, f in ((torch.bfloat16, function), (torch.float64, bench.stacked_read)):
        modules = (copy.deepcopy(m).double() if dtype == torch.float64 else m for m in (read, norm))
        inputs = [s.detach().to(dtype).requires_grad_() for s in states]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            module, its_norm = modules
            mixtures = f(module, its_norm, inputs)
        grads = torch.autograd.grad(mixtures, [*inputs, *module.parameters(), its_norm.weight], [g.to(m.dtype) for g, m in zip(gradients, mixtures)])
        results.append([t.double() for t in (*mixtures, *grads)])
    return np.array([((got - exact).norm() / exact.norm()).item() for got, exact in zip(*results)])


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_is_no_less_exact_than_the_plain_formulation(compiled):
    """Neither than a read in float32 from bf16 states, nor, by far, than the stacked one that autocast runs in bf16."""
    our_function = torch.compile(whole_read, backend="aot_eager") if compiled else whole_read
    ours, plain, stacked = (np.mean([errors_in_bf16(f, seed) for seed in range(5)], 0) for f in (our_function, plain_read, bench.stacked_read))
    assert (ours[:7] <= 1.1 * plain[:7]).all(), (ours, plain)  # mixtures and the gradients of the states
    assert (ours[7:] < 1e-5).all()  # gradients of gain and queries: nothing was rounded on the way
    assert (ours < stacked).all(), (ours, stacked)


class NoNorm(torch.nn.Module):
    """In place of the RMSNorm, which keeps what it keeps in prenorm, too."""

    weight = torch.ones(1)

    def forward(self, x):
        return x


def test_a_read_keeps_its_sources_and_scalars_alone():
    """For the backward: of phase 1 logits and their lse, of phase 2 the mixtures, which whoever reads them keeps too."""
    K, R, B, T, D = 4, 2, 2, 16, 64
    read, norm = DepthRead(ModelConfig(vocab_size=50, n_head=2, d_model=D, variant="rd"), ("qk", "v")), NoNorm()
    sources = [Source(torch.randn(B, T, D, requires_grad=True), torch.rand(B, T, 1)) for _ in range(K)]
    given = [t for source in sources for t in source] + list(read.parameters())
    scalar, state, vectors = 4 * B * T, 4 * B * T * D, 5 * 4 * R * D  # the last: gains times queries
    phase_1 = bench.saved_bytes(lambda: read_finished(sources[:-1], [read], norm)[0][0].mixtures, given)
    assert K * R * scalar <= phase_1 <= K * R * scalar + vectors
    both = bench.saved_bytes(lambda: read(read_finished(sources[:-1], [read, read], norm)[0][1], sources[-1], norm)[0], given)
    assert both <= 2 * phase_1 + R * state + 3 * R * scalar + vectors


def test_the_kernel_keeps_neither_mixtures_nor_what_their_norm_needs():
    K, R, B, T, D = 4, 2, 2, 16, 64
    config = ModelConfig(vocab_size=50, n_head=2, d_model=D, variant="rd")
    read, norm = DepthRead(config, ("qk", "v")), RMSNorm(config)
    sources = [Source(torch.randn(B, T, D, requires_grad=True), torch.rand(B, T, 1)) for _ in range(K)]
    given = [t for source in sources for t in source] + [*read.parameters(), norm.weight]
    kept = bench.saved_bytes(lambda: fused.read_finished(sources, [read], norm)[0][0].mixtures, given)
    scalar, vectors = 4 * B * T, 5 * 4 * R * D
    assert (K + 1) * R * scalar <= kept <= (K + 1) * R * scalar + vectors


def test_the_plain_trunk_is_about_equal():
    """Within 1 % of prenorm's parameters once the table of positions is left out; causal; its gradient reaches everything."""
    config = bench.parse([str(ROOT / "configs" / "bench.toml")])[1]
    plain, prenorm = bench.PlainGPT(config), GPT(bench.train_to_model(config, "prenorm"))
    count = [sum(p.numel() for name, p in m.named_parameters() if "pos_emb" not in name) for m in (plain, prenorm)]
    assert abs(count[0] / count[1] - 1) < 0.01
    config = config_of()
    plain, ids = bench.PlainGPT(config), torch.randint(50, (2, 16))
    targets = torch.full((2, 16), -100)
    targets[:, 3] = 7
    loss, changed = plain(ids, targets)[1], torch.cat([ids[:, :4], (ids[:, 4:] + 1) % 50], 1)
    assert torch.allclose(loss, plain(changed, targets)[1], atol=1e-6) and loss > 0
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in plain.parameters())


@pytest.mark.parametrize("of", [bench.of_medians, bench.of_rounds])
def test_the_interval_covers(of):
    """Two step times that share the machine's slow moments and whose true ratio is 1.25: most of the time."""
    rng, hits, trials = np.random.default_rng(1), 0, 60
    for _ in range(trials):
        slow = 1 + rng.exponential(0.3, 40)
        seconds = slow * rng.normal(1, 0.02, 40), 1.25 * slow * rng.normal(1, 0.02, 40)
        ratio, low, high = bench.ratio_interval(*seconds, of, draws=500)
        assert low <= ratio <= high
        hits += low <= 1.25 <= high
    assert hits >= 0.88 * trials
    assert bench.ratio_interval([2.0] * 5, [3.0] * 5, of) == (1.5, 1.5, 1.5)


def test_slow_moments_cancel_within_rounds():
    rng = np.random.default_rng(2)
    slow = 1 + rng.exponential(0.3, 40)
    seconds = slow * rng.normal(1, 0.02, 40), 1.25 * slow * rng.normal(1, 0.02, 40)
    widths = [high - low for _, low, high in (bench.ratio_interval(*seconds, of) for of in (bench.of_rounds, bench.of_medians))]
    assert widths[0] < 0.5 * widths[1]


def test_flops():
    config = config_of()
    model = GPT(bench.train_to_model(config, "block"))
    matrices = 64 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24)  # the head; qkv, out, gate_up, down of two layers
    assert bench.flops_a_token(config, model) == 6 * matrices + 12 * 2 * 16 * 16
    assert bench.peak_flops(config, torch.device("cpu")) is None


def test_one_step_is_trains(tmp_path):
    """The weights after one update over two passes equal a plain AdamW step on the mean gradient, clipped."""
    config = bench.settle(config_of("--dtype=float64", "--grad_clip=0.1"), torch.device("cpu"))
    entrant, plain = (bench.Entrant("rd", config, torch.device("cpu"), False) for _ in range(2))
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


def test_scaling_into_a_file_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench, "Entrant", lambda *args: pytest.fail("measured"))
    options = types.SimpleNamespace(scaling=str(tmp_path / "file"), clock="wall", rounds=2)
    with pytest.raises(UserError, match="scaling: cannot create the folder"):
        bench.scaling(options, TrainConfig(device="cpu", dtype="float32", compile="false", vocab_size=257), [])


def test_scaling_grid():
    grid = bench.grid(config_of("--n_layer=4", "--n_blocks=4"))
    assert {key: [getattr(c, key) for c in configs] for key, configs in grid.items()} == {
        "n_layer": [2, 4, 8], "n_blocks": [1, 2, 4, 8], "d_model": [8, 16, 32]}  # fmt: skip


def test_scaling_grid_of_few_blocks():
    assert [c.n_blocks for c in bench.grid(config_of("--n_blocks=2"))["n_blocks"]] == [1, 2, 4]


def test_two_ranks(tmp_path):
    options, _, _ = bench.parse([*TINY, "--rounds=2"])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    row = bench.child(options, [*TINY, "--data_dir=nowhere"], "rd", "ranks", launcher)
    assert row["ranks"] == 2 and row["step_ms"] > 0 and row["collective_share"] < 1


@pytest.mark.parametrize("name", ["bench", "xs"])
def test_configs_fit_train(name):
    """Updates and milestones are whole numbers of each other, and the model builds."""
    config = bench.parse([str(ROOT / "configs" / f"{name}.toml")])[1]
    assert config.batch_tokens % (config.micro_batch * config.context) == 0
    assert all(tokens % config.batch_tokens == 0 for tokens in (config.max_tokens, config.warmup_tokens, *config.milestones))
    assert config.milestones[-1] == config.max_tokens
    GPT(bench.train_to_model(config, "rd"))
