"""The promises that train.py keeps: data order, gradients over passes and ranks, evaluation, checkpoints, refusals.

Runs are tiny (2 layers, 32 wide, float64) and in this process where possible. What they must give is computed by `reference`:
plain loops over the tokens, with AdamW, clipping and schedule written out; of this repository it uses the model alone. Run as
a script, this file is train.py under observation: `test_train.py SPEC.json --key=value ...`, under torchrun too.
"""
import contextlib
import dataclasses
import gc
import json
import math
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.config import TrainConfig
from lib.errors import RankError, UserError, or_exit, warn
from lib.files import lock_folder
from lib.run_folder import load_run, read_metrics, save_checkpoint
from lib.shards import SPLITS, Windows, load_manifest
import model as model_py
import train
from helpers import ENV, ROOT, write_folder, write_shard
from test_common import MACHINE

CONTEXT, BATCH, VOCAB = 32, 8, 50  # BATCH: windows an update
UPDATE = BATCH * CONTEXT  # tokens an update
SHARDS = {"train_000000": 10 * CONTEXT + 6, "train_000001": 13 * CONTEXT + 21, "val_000000": 11 * CONTEXT + 1, "test_000000": 5 * CONTEXT + 9}
TINY = dict(
    n_layer=2, d_model=32, n_head=2, d_mlp=48, n_blocks=2, context=CONTEXT, norm_eps=1e-8, init_std=0.1,
    batch_tokens=UPDATE, micro_batch=4, max_tokens=6 * UPDATE, warmup_tokens=2 * UPDATE,
    lr=1e-2, min_lr_ratio=0.2, weight_decay=0.3, adam_eps=1e-3, grad_clip=0.5,  # so large that a wrong scale of the gradient shows
    eval_tokens=7 * CONTEXT, milestones=(3 * UPDATE,), log_interval=1, checkpoint_interval=2,
    device="cpu", dtype="float64", compile="false",
)  # fmt: skip


# ---- running and observing ----


def split_of(windows):
    return next(split for split in SPLITS if windows.paths[0].name.startswith(split))


@contextlib.contextmanager
def reading(before=None):
    """A list of (split, window ids) of every Windows.read meanwhile; before(split, number of this read) is called first."""
    log, original = [], Windows.read

    def read(self, ids):
        log.append((split_of(self), [int(i) for i in ids]))
        if before:
            before(log[-1][0], sum(split == log[-1][0] for split, _ in log))
        return original(self, ids)

    Windows.read = read
    try:
        yield log
    finally:
        Windows.read = original


def train_ids(log):
    return [i for split, ids in log if split == "train" for i in ids]


def config_for(data, out, **changes):
    return TrainConfig(**(TINY | dict(data_dir=str(data.folder), out_dir=str(out)) | changes))


def run(data, out, before=None, status=0, **changes):
    """One run in this process -> its metrics, checkpoint and reads."""
    with reading(before) as log:
        assert train.main(config_for(data, out, **changes), "tiny") == status
    return result(out, log)


def result(out, log=None):
    records = read_metrics(Path(out) / "metrics.jsonl")
    of = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "test")}
    state = torch.load(Path(out) / "ckpt.pt", weights_only=True)
    return types.SimpleNamespace(out=Path(out), reads=log, records=records, state=state, **of,
                                 losses=[r["loss"] for r in of["train"]], norms=[r["grad_norm"] for r in of["train"]])  # fmt: skip


def values(records):
    """Records without their speed."""
    return [{name: value for name, value in r.items() if name != "tokens_per_s"} for r in records]


def assert_same(a, b, path="state"):
    """Bitwise equality of nested states."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for name in a:
            assert_same(a[name], b[name], f"{path}.{name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def assert_same_run(a, b):
    """Weights, optimizer and records, bitwise; records without their speed."""
    assert values(a.records) == values(b.records)
    for name in ("model", "optimizer", "step"):
        assert_same(a.state[name], b.state[name], name)


def assert_close(a, b, tolerance=1e-11):
    """Two state dicts, up to the order of float64 sums."""
    assert list(a) == list(b)
    for name in a:
        assert (a[name] - b[name]).abs().max() < tolerance, name


def observed(spec, tmp, *argv, ranks=1):
    """train.py in a process of its own, or under torchrun, observed as `spec` says (see the end of this file)."""
    path = tmp / "spec.json"
    path.write_text(json.dumps(spec))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return subprocess.run([sys.executable, *launch, __file__, str(path), *argv], env={**ENV, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=240)  # fmt: skip


def arguments(data, out, **changes):
    """The command line of a config."""
    config = dataclasses.asdict(config_for(data, out, **changes))
    return [f"--{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in config.items()]


@pytest.fixture(autouse=True)
def leave_no_trace():
    """Handlers go back to pytest's; the lock of a run that raised is dropped with its frames."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.collect()


# ---- data, and the runs that several tests look at ----


def make_data(folder, **kwargs):
    rng = np.random.default_rng(0)
    tokens = {name: rng.integers(VOCAB, size=size).tolist() for name, size in SHARDS.items()}
    return types.SimpleNamespace(folder=write_folder(folder, vocab_size=VOCAB, **kwargs, **tokens), tokens=tokens)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def solo(data, tmp_path_factory):
    """An uninterrupted run: rd, two passes an update."""
    return run(data, tmp_path_factory.mktemp("runs") / "solo", variant="rd")


@pytest.fixture(scope="module")
def pair_of_ranks(data, tmp_path_factory):
    """The same run on two gloo ranks, two passes of two windows each. Rank 1 alone gets SIGTERM, in update 4 of 6."""
    tmp = tmp_path_factory.mktemp("ranks")
    process = observed({"log": str(tmp / "log"), "sigterm": {"rank": 1, "read": 2 * 3 + 1}}, tmp,
                       *arguments(data, tmp / "out", variant="rd", micro_batch=2), ranks=2)  # fmt: skip
    logs = [json.loads((tmp / f"log{rank}.json").read_text()) for rank in (0, 1)]
    return types.SimpleNamespace(process=process, logs=logs, **vars(result(tmp / "out")))


# ---- the reference ----


def cut(tokens, split):
    """All windows of a split, shard after shard."""
    return [t[start : start + CONTEXT + 1] for name, t in sorted(tokens.items()) if name.startswith(split)
            for start in range(0, len(t) - CONTEXT, CONTEXT)]  # fmt: skip


def order(seed, n_updates, n_windows):
    """Window ids an update: one frozen numpy permutation an epoch, one after another."""
    stream = [int(i) for epoch in range(n_updates * BATCH // n_windows + 1) for i in np.random.RandomState([seed, epoch]).permutation(n_windows)]
    return [stream[n * BATCH : (n + 1) * BATCH] for n in range(n_updates)]


def mean_nll(gpt, windows):
    """Mean over the windows, one at a time."""
    return sum(gpt(torch.tensor([w[:-1]]), torch.tensor([w[1:]]))[1] for w in windows) / len(windows)


def reference(data, n_updates, **changes):
    """The protocol in plain loops, float64: losses, gradient norms, learning rates, validation after each update, weights."""
    c = types.SimpleNamespace(**(TINY | dict(seed=1, variant="rd", rope_theta=10000.0, betas=(0.9, 0.95)) | changes))
    torch.manual_seed(c.seed)
    names = [field.name for field in dataclasses.fields(model_py.ModelConfig)]
    gpt = model_py.GPT(model_py.ModelConfig(vocab_size=VOCAB, **{name: getattr(c, name) for name in names if name != "vocab_size"})).double()
    windows, val = cut(data.tokens, "train"), cut(data.tokens, "val")
    val = [val[i * 11 // 7] for i in range(7)]
    trained = {name: p for name, p in gpt.named_parameters() if p.requires_grad}
    first = {name: torch.zeros_like(p) for name, p in trained.items()}
    second = {name: torch.zeros_like(p) for name, p in trained.items()}
    out = types.SimpleNamespace(losses=[], norms=[], lrs=[], val=[])
    for n, ids in enumerate(order(c.seed, n_updates, len(windows)), start=1):
        loss = mean_nll(gpt, [windows[i] for i in ids])
        gradients = dict(zip(trained, torch.autograd.grad(loss, trained.values())))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        scale = min(1.0, c.grad_clip / (norm + 1e-6)) if c.grad_clip else 1.0
        warmup, end = c.warmup_tokens / UPDATE, c.max_tokens / UPDATE
        final = c.min_lr_ratio * c.lr
        lr = c.lr * n / warmup if n < warmup else final + (c.lr - final) * 0.5 * (1 + math.cos(math.pi * (n - warmup) / (end - warmup)))
        with torch.no_grad():
            for name, p in trained.items():
                g = gradients[name] * scale
                first[name] = c.betas[0] * first[name] + (1 - c.betas[0]) * g
                second[name] = c.betas[1] * second[name] + (1 - c.betas[1]) * g * g
                if p.ndim == 2:
                    p *= 1 - lr * c.weight_decay
                p -= lr * first[name] / (1 - c.betas[0] ** n) / ((second[name] / (1 - c.betas[1] ** n)).sqrt() + c.adam_eps)
            out.val.append(mean_nll(gpt, val).item())
        out.losses.append(loss.item())
        out.norms.append(norm)
        out.lrs.append(lr)
    out.weights = gpt.state_dict()
    return out


@pytest.fixture(scope="module")
def expected(data):
    return reference(data, 6)


# ---- the schedule ----


def test_step_n_means_after_exactly_n_updates_and_a_last_batch_that_is_not_full_counts():
    config = TrainConfig(batch_tokens=100, max_tokens=1000, warmup_tokens=0, milestones=())
    assert [train.updates(tokens, config) for tokens in (1, 99, 100, 101, 900, 901, 1000)] == [1, 1, 1, 2, 9, 10, 10]


def rates(**changes):
    config = TrainConfig(**(dict(batch_tokens=100, max_tokens=2000, warmup_tokens=500, lr=0.8, min_lr_ratio=0.25, milestones=()) | changes))
    return [train.learning_rate(step, config) for step in range(train.updates(config.max_tokens, config))]


def test_the_learning_rate_warms_up_from_the_first_update_and_ends_at_its_floor():
    lrs = rates()
    assert lrs[:5] == pytest.approx([0.16, 0.32, 0.48, 0.64, 0.8], rel=1e-12)
    assert lrs[4:] == pytest.approx([0.2 + 0.3 * (1 + math.cos(math.pi * n / 15)) for n in range(16)], rel=1e-12)
    assert lrs[-1] == pytest.approx(0.2, rel=1e-12)
    assert min(lrs) > 0 and max(lrs) == lrs[4]


def test_without_warm_up_the_cosine_starts_at_once_and_zero_is_a_floor():
    lrs = rates(warmup_tokens=0, min_lr_ratio=0)
    assert lrs == pytest.approx([0.4 * (1 + math.cos(math.pi * n / 20)) for n in range(1, 21)], rel=1e-12)
    assert lrs[-1] == 0


def test_the_last_update_has_the_final_rate_also_where_it_is_not_full():
    lrs = rates(max_tokens=1950)
    assert len(lrs) == 20 and lrs[-1] == pytest.approx(0.2, rel=1e-12) and lrs[-2] > lrs[-1]


# ---- what a run computes ----


def test_loss_gradient_norm_rate_and_weights_are_the_protocols(solo, expected):
    """Six updates over two epochs of two shards, two passes each, against plain loops: scale of the gradient, clipping, weight
    decay, rate and AdamW's constants all show in the weights."""
    assert [r["step"] for r in solo.train] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in solo.train] == [UPDATE * n for n in range(1, 7)]
    assert max(expected.norms) > TINY["grad_clip"] * 1.5  # clipping bites
    assert solo.losses == pytest.approx(expected.losses, rel=1e-12)
    assert solo.norms == pytest.approx(expected.norms, rel=1e-10)
    assert [r["lr"] for r in solo.train] == pytest.approx(expected.lrs, rel=1e-12)
    assert_close(solo.state["model"], expected.weights)


@pytest.mark.parametrize("variant, changes", [("block", dict(grad_clip=0.0)), ("frozen_v", dict(seed=2)), ("prenorm", dict(weight_decay=0.0, n_layer=3))])
def test_other_variants_and_settings_too(variant, changes, data, tmp_path):
    ours, theirs = run(data, tmp_path / "out", variant=variant, max_tokens=3 * UPDATE, **changes), reference(data, 3, variant=variant, max_tokens=3 * UPDATE, **changes)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)
    assert_close(ours.state["model"], theirs.weights)


def test_the_number_of_passes_changes_nothing(data, solo, tmp_path):
    """One pass of 8 windows, two of 4 (`solo`), eight of 1: the same update."""
    for micro_batch in (8, 1):
        other = run(data, tmp_path / str(micro_batch), micro_batch=micro_batch)
        assert train_ids(other.reads) == train_ids(solo.reads)
        assert other.losses == pytest.approx(solo.losses, rel=1e-12) and other.norms == pytest.approx(solo.norms, rel=1e-10)
        assert [r["val_nll"] for r in other.eval] == pytest.approx([r["val_nll"] for r in solo.eval], rel=1e-12)
        assert_close(other.state["model"], solo.state["model"])


def test_every_window_is_read_once_an_epoch_in_the_order_that_seed_and_epoch_give(solo):
    ids = train_ids(solo.reads)
    assert ids == sum(order(1, 6, 23), [])
    assert sorted(ids[:23]) == sorted(ids[23:46]) == list(range(23)) and ids[:23] != ids[23:46]


def test_block_and_rd_read_the_same_windows_in_the_same_order(data, solo, tmp_path):
    """They pair: nothing of the variant, not even its further parameters, moves the data. Another seed does."""
    block = run(data, tmp_path / "block", variant="block")
    assert block.reads == solo.reads and block.losses != solo.losses
    other = run(data, tmp_path / "seed", seed=2)
    assert train_ids(other.reads) != train_ids(solo.reads)


def test_the_same_seed_twice_is_bitwise_the_same_run_whatever_the_generators_held(data, solo, tmp_path):
    torch.manual_seed(987)
    torch.rand(3)
    np.random.seed(987)
    again = run(data, tmp_path / "again")
    assert again.losses == solo.losses and again.reads == solo.reads
    assert_same_run(again, solo)


def test_records_say_what_tools_expect(solo):
    assert all(list(r) == ["kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s"] for r in solo.train)
    assert all(list(r) == ["kind", "step", "tokens", "val_nll"] for r in solo.eval)
    assert all(list(r) == ["kind", "step", "tokens", "test_nll"] for r in solo.test)
    config = json.loads((solo.out / "config.json").read_text())
    assert {name: config[name] for name in TINY} == json.loads(json.dumps(TINY))
    assert (config["vocab_size"], config["tokenizer"], config["variant"], config["seed"]) == (VOCAB, "bytes", "rd", 1)  # as resolved
    assert config["n_params"] == sum(w.numel() for w in solo.state["model"].values())
    assert config["data_id"] == solo.state["data_id"] and config["world"] == 1 and config["torch"] == torch.__version__


def test_log_lines_come_each_interval_and_at_both_ends(data, tmp_path):
    sparse = run(data, tmp_path / "out", log_interval=4, max_tokens=10 * UPDATE)
    assert [r["step"] for r in sparse.train] == [1, 4, 8, 10]


def test_speed_counts_updates_and_not_evaluations(data, tmp_path, monkeypatch):
    """On a clock where a read of training data takes a second and one of validation data an hour."""
    now = [0.0]
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_time(split, number):
        now[0] += 1 if split == "train" else 3600

    timed = run(data, tmp_path / "out", pass_time, micro_batch=8, eval_interval=1, log_interval=2)
    assert [r["tokens_per_s"] for r in timed.train] == [UPDATE] * 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another one")
def test_a_step_pays_for_no_page_that_the_step_before_had():
    script = """if True:
        import resource, sys, torch, train
        def step():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            tensors = [torch.ones(2**20) for _ in range(16)]
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        if sys.argv[1] == "keep":
            train.keep_freed_memory(torch.device("cpu"))
        print(min(step() for _ in range(4)))"""
    env = ENV | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's own value at the start; what it makes of it later is up to the order of things
    faults = {how: int(subprocess.check_output([sys.executable, "-c", script, how], cwd=ROOT, env=env)) for how in ("keep", "give")}
    assert 10 * faults["keep"] + 10 < faults["give"], faults  # 64 MiB, in pages of 4 KiB or of 2 MiB


def test_the_run_folder_is_named_after_config_variant_and_seed(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_config = config_for(data, "", variant="block", seed=3, max_tokens=2 * UPDATE, milestones=(UPDATE,))
    assert train.main(run_config, "tiny") == 0
    assert sorted(path.name for path in (tmp_path / "out/tiny/block-s3").iterdir() if path.name[0] != ".") == ["ckpt.pt", "config.json", "metrics.jsonl"]


def test_bfloat16_is_an_autocast_over_float32_weights(data, tmp_path):
    wide = run(data, tmp_path / "wide", dtype="float32")
    half = run(data, tmp_path / "half", dtype="bfloat16")
    assert {w.dtype for w in half.state["model"].values()} == {w.dtype for w in wide.state["model"].values()} == {torch.float32}
    assert half.losses != wide.losses and half.losses == pytest.approx(wide.losses, rel=2e-2)
    assert half.eval[0]["val_nll"] != wide.eval[0]["val_nll"]


# ---- the optimizer ----


@pytest.mark.parametrize("variant", ["rd", "frozen_v", "q_k_v", "prenorm"])
def test_weight_decay_shrinks_matrices_only_never_queries_or_gains(variant, data, tmp_path):
    """One step at zero gradients: matrices shrink by exactly 1 - lr * weight_decay, all else stays as it was."""
    config = dataclasses.replace(config_for(data, tmp_path, variant=variant), vocab_size=VOCAB)
    gpt = train.build_model(config)
    with torch.no_grad():
        for p in gpt.parameters():
            if p.ndim == 1:
                p.uniform_(1, 2)  # queries are zero at the start: nothing would show
    before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    optimizer = train.build_optimizer(gpt, config)
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in gpt.named_parameters():
        assert torch.equal(p, before[name]) if name.endswith(("norm.weight", "query", "query_v", "query_k")) else torch.allclose(
            p, before[name] * (1 - TINY["lr"] * TINY["weight_decay"]), rtol=1e-12, atol=0), name  # fmt: skip
    frozen = [name for name, p in gpt.named_parameters() if not p.requires_grad]
    assert frozen == (["layers.0.attn_read.query_v", "layers.1.attn_read.query_v"] if variant == "frozen_v" else [])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in gpt.parameters() if p.requires_grad} == {id(p) for p in optimizer.state}


def test_frozen_queries_stay_zero_and_have_no_optimizer_state(data, tmp_path):
    frozen = run(data, tmp_path / "out", variant="frozen_v")
    queries = [w for name, w in frozen.state["model"].items() if name.endswith("query_v")]
    assert len(queries) == 2 and not any(w.any() for w in queries)
    assert len(frozen.state["optimizer"]["state"]) == len(frozen.state["model"]) - 2


# ---- several ranks ----


def test_two_ranks_are_the_same_run_as_one(pair_of_ranks, solo):
    """Losses, gradient norms, validation and records are those of the global batch."""
    assert [r["step"] for r in pair_of_ranks.train] == [1, 2, 3, 4]
    assert pair_of_ranks.losses == pytest.approx(solo.losses[:4], rel=1e-12)
    assert pair_of_ranks.norms == pytest.approx(solo.norms[:4], rel=1e-10)
    assert [r["step"] for r in pair_of_ranks.eval] == [3]
    assert pair_of_ranks.eval[0]["val_nll"] == pytest.approx(solo.eval[0]["val_nll"], rel=1e-12)


def test_ranks_slice_each_batch_and_share_the_evaluation(pair_of_ranks, solo):
    reads = [log["reads"] for log in pair_of_ranks.logs]
    ids = [train_ids(r) for r in reads]
    for n in range(4):
        assert ids[0][4 * n : 4 * n + 4] + ids[1][4 * n : 4 * n + 4] == train_ids(solo.reads)[8 * n : 8 * n + 8]
    assert [len(i) for i in ids] == [16, 16]
    # 7 windows in passes of 2, in turn; the last is filled with a row that does not count
    val = [[i for split, i in r if split == "val"] for r in reads]
    spread = [i * 11 // 7 for i in range(7)]
    assert val == [[spread[0:2], spread[4:6]], [spread[2:4], [spread[6]] * 2]]


def test_gradients_meet_once_an_update_after_its_last_pass(pair_of_ranks):
    for log in pair_of_ranks.logs:
        assert log["synced_after_reads"] == [2, 4, 6, 8]


def test_one_rank_told_to_stop_stops_all_and_another_number_of_ranks_goes_on(pair_of_ranks, solo, data, tmp_path):
    assert "exitcode  : 75" in pair_of_ranks.process.stderr and "Traceback (most recent call last):\n  File \"train.py" not in pair_of_ranks.process.stderr
    assert pair_of_ranks.process.stdout.count("told to stop; saved at step 4") == 1
    assert [log["status"] for log in pair_of_ranks.logs] == [75, 75] and pair_of_ranks.state["step"] == 4
    shutil.copytree(pair_of_ranks.out, tmp_path / "out")
    rest = run(data, tmp_path / "out")
    assert train_ids(rest.reads) == train_ids(solo.reads)[32:]
    assert rest.losses == pytest.approx(solo.losses, rel=1e-12)
    assert_close(rest.state["model"], solo.state["model"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_window_is_reported_by_the_rank_that_met_it(rank, data, tmp_path, monkeypatch):
    """Also in an evaluation: the others only wait for that rank, and are stopped."""
    bad = write_folder(tmp_path / "data", vocab_size=VOCAB, train_0=data.tokens["train_000000"], val_0=[VOCAB] * (4 * CONTEXT + 1))
    config = dataclasses.replace(config_for(data, tmp_path / "out", data_dir=str(bad), micro_batch=1), vocab_size=VOCAB)
    monkeypatch.setattr(train, "RANK", rank)
    monkeypatch.setattr(train, "WORLD", 2)
    gpt = train.build_model(config)
    with pytest.raises(RankError, match=rf"rank {rank}.*val_0\.bin: token {rank * CONTEXT} is {VOCAB}, beyond the vocabulary"):
        train.evaluate(gpt, Windows(bad, "val", CONTEXT, VOCAB), config, torch.device("cpu"), contextlib.nullcontext)


# ---- evaluation ----


def test_evaluations_come_at_milestones_and_the_end_after_exactly_that_many_updates(data, solo, expected, tmp_path):
    assert [(r["step"], r["tokens"]) for r in solo.eval] == [(3, 3 * UPDATE), (6, 6 * UPDATE)]
    assert [r["val_nll"] for r in solo.eval] == pytest.approx([expected.val[2], expected.val[5]], rel=1e-12)
    other = run(data, tmp_path / "out", milestones=(1, UPDATE + 1, 4 * UPDATE))
    assert [r["step"] for r in other.eval] == [1, 2, 4, 6]
    eighths = run(data, tmp_path / "eighths", milestones=(), max_tokens=16 * UPDATE)
    assert [r["step"] for r in eighths.eval] == [2, 4, 8, 16]


def test_the_value_does_not_depend_on_passes_or_ranks(data, tmp_path, monkeypatch):
    """7 windows: no number of rows but 1 divides them. Two ranks are summed by hand."""
    base = dataclasses.replace(config_for(data, tmp_path), vocab_size=VOCAB)
    gpt = train.build_model(base)
    windows = Windows(data.folder, "val", CONTEXT, VOCAB)
    val = cut(data.tokens, "val")
    with torch.no_grad():
        expected = mean_nll(gpt, [val[i * 11 // 7] for i in range(7)]).item()

    def value(micro_batch):
        return train.evaluate(gpt, windows, dataclasses.replace(base, micro_batch=micro_batch), torch.device("cpu"), contextlib.nullcontext)

    assert [value(m) for m in (1, 2, 3, 7, 8, 16)] == pytest.approx([expected] * 6, rel=1e-12)
    sums = {}
    monkeypatch.setattr(train, "WORLD", 2)
    for micro_batch in (1, 3, 8):
        for rank in (0, 1):
            monkeypatch.setattr(train, "RANK", rank)
            monkeypatch.setattr(train, "all_reduce", lambda values, device: sums.setdefault((micro_batch, rank), values) and [1.0, 1.0])
            value(micro_batch)
        total, count = map(sum, zip(sums[micro_batch, 0], sums[micro_batch, 1]))
        assert (total / count, count) == (pytest.approx(expected, rel=1e-12), 7)


def test_evaluating_touches_no_generator_and_tracks_no_gradient(data, tmp_path):
    config = dataclasses.replace(config_for(data, tmp_path), vocab_size=VOCAB)
    gpt = train.build_model(config)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    tracked = []
    gpt.register_forward_hook(lambda module, inputs, outputs: tracked.append(outputs[1].requires_grad))
    train.evaluate(gpt, Windows(data.folder, "val", CONTEXT, VOCAB), config, torch.device("cpu"), contextlib.nullcontext)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[1:]
    assert tracked == [False, False] and all(p.grad is None for p in gpt.parameters())


def test_evaluating_more_often_changes_no_loss_and_no_weight(data, solo, tmp_path):
    often = run(data, tmp_path / "out", eval_interval=1)
    assert [r["step"] for r in often.eval] == [1, 2, 3, 4, 5, 6]
    assert often.losses == solo.losses
    assert_same(often.state["model"], solo.state["model"])


def test_the_test_split_is_read_once_when_the_run_ends(solo, data, tmp_path):
    test = [i for i, (split, _) in enumerate(solo.reads) if split == "test"]
    assert [i for n in test for i in solo.reads[n][1]] == [0, 1, 2, 3, 4, 4, 4, 4]  # 5 windows in passes of 4
    assert test[0] > max(i for i, (split, _) in enumerate(solo.reads) if split == "train")
    assert [(r["step"], r["tokens"]) for r in solo.test] == [(6, 6 * UPDATE)]
    gpt = train.build_model(dataclasses.replace(config_for(data, tmp_path), vocab_size=VOCAB))
    gpt.load_state_dict(solo.state["model"])
    with torch.no_grad():
        assert solo.test[0]["test_nll"] == pytest.approx(mean_nll(gpt, cut(data.tokens, "test")).item(), rel=1e-12)
    again = copy_and_run(solo, data, tmp_path)
    assert not again.reads


def test_without_a_test_split_a_run_ends_without_one(data, tmp_path):
    plain = write_folder(tmp_path / "data", vocab_size=VOCAB, train_0=data.tokens["train_000000"], val_0=data.tokens["val_000000"])
    assert not run(data, tmp_path / "out", data_dir=str(plain), max_tokens=3 * UPDATE).test


# ---- compile ----


@contextlib.contextmanager
def graphs():
    """Counts what torch.compile traces meanwhile, in a state of its own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield torch._dynamo.utils.counters
    finally:
        torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile traces, but does not call a C++ compiler: float64 stays exact, and it is quick."""
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *arguments, **options: original(*arguments, **options, backend="aot_eager"))


def test_compiling_gives_the_same_run(data, solo, tmp_path, traced_only):
    """No graph break, and no graph anew after the first update and the first evaluation, though its last pass is short."""
    with graphs() as counters:
        traced = run(data, tmp_path / "out", compile="true")
        assert counters["stats"]["unique_graphs"] == 6 and not counters["graph_break"]
        # two sublayers and the loss, to train and to evaluate
    assert traced.losses == pytest.approx(solo.losses, rel=1e-12)
    assert [r["val_nll"] for r in traced.eval] == pytest.approx([r["val_nll"] for r in solo.eval], rel=1e-12)
    assert_close(traced.state["model"], solo.state["model"])  # the same names, too: no _orig_mod.


@pytest.mark.parametrize("variant, sublayers", [("prenorm", 2), ("block", 3), ("rd", 3)])
def test_graphs_do_not_grow_with_depth(data, tmp_path, traced_only, variant, sublayers):
    """Two sublayers (attention twice: with a running sum and without) and the loss; the reads' phase 1 on a GPU alone, for each
    number of sources."""
    for n_layer, device in ((4, "cpu"), (8, "cpu"), (8, "cuda")):
        config = train.resolve(config_for(data, tmp_path, variant=variant, n_layer=n_layer, n_blocks=n_layer // 2), torch.device("cpu"), None)
        model, expected = train.build_model(config), train.build_model(config)
        with graphs() as counters:
            train.compile_parts(model, torch.device(device))  # which only decides what is compiled
            idx = torch.randint(config.vocab_size, (2, config.context))
            loss = model(idx, idx)[1]
            loss.backward()
            reads = n_layer // 2 + 1 if device == "cuda" and variant != "prenorm" else 0
            assert counters["stats"]["unique_graphs"] == sublayers + 1 + reads and not counters["graph_break"]
        other = expected(idx, idx)[1]
        other.backward()
        assert loss.item() == pytest.approx(other.item(), rel=1e-12)
        for p, q in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-14)


def test_compiled_and_not_agree(data, tmp_path, monkeypatch):
    """In earnest, in float32; training alone and one block, since compiling is slow."""
    monkeypatch.setattr(train, "evaluate", lambda *arguments: 0.0)
    tiny = dict(dtype="float32", n_layer=1, n_blocks=1)
    plain = run(data, tmp_path / "plain", **tiny)
    with graphs() as counters:
        compiled = run(data, tmp_path / "compiled", compile="true", **tiny)
        assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(compiled.state["model"], plain.state["model"], 1e-4)


def test_compile_on_a_cpu_without_a_compiler_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="^config key compile: on a CPU torch.compile needs a C"):
        run(data, tmp_path / "out", compile="true")
    assert not train.pick_compile(config_for(data, tmp_path, compile="auto"), torch.device("cpu"))
    assert train.pick_compile(config_for(data, tmp_path, compile="auto"), torch.device("cuda"))
    assert not train.pick_compile(config_for(data, tmp_path, compile="false"), torch.device("cuda"))


# ---- stopping and going on ----


class Killed(BaseException):
    """Stands for a kill where the process must live on."""


def copy_and_run(finished, data, tmp, **changes):
    shutil.copytree(finished.out, tmp / "copy")
    return run(data, tmp / "copy", **changes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_a_run_saves_and_goes_on_bitwise_as_if_it_had_not_been(number, data, solo, tmp_path, capfd):
    def stop(split, read):
        if (split, read) == ("train", 6):  # the second pass of update 3
            os.kill(os.getpid(), number)

    first = run(data, tmp_path / "out", stop, status=75)
    assert first.state["step"] == 3 and len(first.losses) == 3
    assert "told to stop; saved at step 3: run the same command to go on" in capfd.readouterr().out
    rest = run(data, tmp_path / "out")
    assert train_ids(first.reads) + train_ids(rest.reads) == train_ids(solo.reads)
    assert_same_run(rest, solo)


def test_a_stop_changes_no_record_whatever_the_log_interval(data, tmp_path):
    def stop(split, read):
        if (split, read) == ("train", 6):
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run(data, tmp_path / "whole", log_interval=5)
    run(data, tmp_path / "out", stop, status=75, log_interval=5)
    assert_same_run(run(data, tmp_path / "out", log_interval=5), whole)


def test_sigterm_ends_the_script_with_75_and_sigkill_between_two_renames_loses_nothing(data, solo, tmp_path):
    """The real script, in processes of its own: told in update 3; then killed while the checkpoint of update 4 moves to its
    name; then run to its end."""
    argv = arguments(data, tmp_path / "out")
    told = observed({"log": str(tmp_path / "log"), "sigterm": {"rank": 0, "read": 5}}, tmp_path, *argv)
    assert (told.returncode, told.stderr) == (75, "") and "told to stop; saved at step 3" in told.stdout
    assert result(tmp_path / "out").state["step"] == 3
    killed = observed({"log": str(tmp_path / "log"), "sigkill": "ckpt.pt"}, tmp_path, *argv)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "out" / "ckpt.pt").exists()
    assert torch.load(tmp_path / "out" / "ckpt.prev.pt", weights_only=True)["step"] == 3
    assert [r["step"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if r["kind"] == "train"] == [1, 2, 3, 4]
    rest = run(data, tmp_path / "out")
    assert train_ids(rest.reads) == train_ids(solo.reads)[24:]
    assert_same_run(rest, solo)


def test_a_run_killed_at_any_moment_of_its_writing_goes_on_bitwise(data, solo, tmp_path, monkeypatch):
    """Before each rename that it does: of config, metrics, and three checkpoints in two or three moves each."""
    original, calls = os.replace, []

    def replace(source, target):
        calls.append(Path(target).name)
        if len(calls) == deadline:
            raise Killed
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    deadline = 0
    run(data, tmp_path / "count")
    assert calls == ["config.json", "metrics.jsonl"] + ["ckpt.new.pt", "ckpt.pt"] + 2 * ["ckpt.new.pt", "ckpt.prev.pt", "ckpt.pt"]
    for moment in range(1, len(calls) + 1):
        out, deadline = tmp_path / str(moment), moment
        calls.clear()
        with contextlib.suppress(Killed):
            run(data, out)
            pytest.fail("was not killed")
        gc.collect()
        if (out / "metrics.jsonl").exists():
            with open(out / "metrics.jsonl", "a") as file:
                file.write('{"kind": "train", "st')  # a line cut short
        deadline = 0
        assert_same_run(run(data, out), solo)


def test_a_finished_run_run_again_does_nothing(data, solo, tmp_path, capfd):
    shutil.copytree(solo.out, tmp_path / "out")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()}
    again = run(data, tmp_path / "out")
    assert again.reads == [] and "finished: 6 updates" in capfd.readouterr().out
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("interval, minutes, at", [(0, 1000, [6]), (0, 1e-9, [1, 2, 3, 4, 5, 6]), (4, 1000, [4, 6]), (0, 1, [2, 4, 6])])
def test_checkpoints_come_by_the_clock_or_by_the_update(interval, minutes, at, data, solo, tmp_path, monkeypatch):
    """Whenever they come, the run is the same. In the last case an update takes 30.5 seconds."""
    saves, original, now = [], save_checkpoint, [0.0]
    monkeypatch.setattr(train, "save_checkpoint", lambda path, state: saves.append(state["step"]) or original(path, state))
    if minutes == 1:
        monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])

    def tick(split, read):
        if split == "train" and read % 2:
            now[0] += 30.5

    whole = run(data, tmp_path / "out", tick, checkpoint_interval=interval, checkpoint_minutes=minutes)
    assert saves == at
    assert_same_run(whole, solo)


def test_a_run_says_how_often_it_reads_the_data_and_what_share_was_no_update(data, tmp_path, capfd):
    run(data, tmp_path / "out")
    out = capfd.readouterr().out
    assert f"windows of {CONTEXT} tokens: 23 to train on, read {6 * BATCH / 23:.2g} times; evaluation on 7 of 11" in out
    shares = re.search(r"finished: updates 0 to 6 in \d+:\d\d; evaluation (\S+)%, checkpoints (\S+)%", out)
    assert all(0 < float(share) < 100 for share in shares.groups()) and sum(map(float, shares.groups())) < 100


def test_a_run_stopped_by_stop_tokens_goes_on_when_they_are_raised(data, solo, tmp_path):
    """On the same schedule; its own end is evaluated too."""
    first = run(data, tmp_path / "out", stop_tokens=3 * UPDATE - 1, milestones=(6 * UPDATE,))
    assert first.state["step"] == 3 and [r["step"] for r in first.eval] == [r["step"] for r in first.test] == [3]
    assert first.losses == solo.losses[:3] and first.eval[0] == solo.eval[0]
    rest = run(data, tmp_path / "out", stop_tokens=0)
    assert [r for r in rest.records if r["kind"] == "train" and r["step"] > 3] and train_ids(rest.reads) == train_ids(solo.reads)[24:]
    assert values([r for r in rest.records if (r["kind"], r["step"]) != ("test", 3)]) == values(solo.records)
    assert_same(rest.state["optimizer"], solo.state["optimizer"])
    assert_same(rest.state["model"], solo.state["model"])


def test_metrics_hold_each_step_once_after_a_fall_back_to_an_older_checkpoint(data, solo, tmp_path, capfd):
    """A checkpoint that is cut short, or altered inside, is named in a warning, and the one before it used."""
    whole = (solo.out / "ckpt.pt").read_bytes()
    middle = len(whole) // 2
    for name, damage in {"short": whole[:-100], "empty": b"", "altered": whole[:middle] + bytes(255 - b for b in whole[middle : middle + 64]) + whole[middle + 64 :]}.items():
        out = tmp_path / name
        shutil.copytree(solo.out, out)
        (out / "ckpt.pt").write_bytes(damage)
        capfd.readouterr()
        rest = run(data, out)
        warnings = [line for line in capfd.readouterr().err.splitlines()]
        assert len(warnings) == 1 and warnings[0].startswith(f"warning: {out / 'ckpt.pt'} is damaged (")
        assert train_ids(rest.reads) == train_ids(solo.reads)[32:]  # from step 4
        assert_same_run(rest, solo)
        steps = [(r["kind"], r["step"]) for r in rest.records]
        assert len(steps) == len(set(steps))


# one more value of every key that is part of a run's identity; each gives a valid config
OTHER = dict(variant="block", vocab_size=60, n_layer=3, n_head=4, d_model=36, d_mlp=40, context=16, n_blocks=4, norm_eps=1e-6, rope_theta=100.0,
             init_std=0.2, tokenizer="gpt2", seed=2, batch_tokens=2 * UPDATE, max_tokens=7 * UPDATE, warmup_tokens=UPDATE, lr=2e-2, min_lr_ratio=0.3,
             weight_decay=0.2, betas=(0.8, 0.95), adam_eps=1e-4, grad_clip=1.0, eval_tokens=8 * CONTEXT, dtype="float32")  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Data without a manifest, where vocabulary and tokenizer are the user's, and a run on them stopped after 2 updates."""
    tmp = tmp_path_factory.mktemp("bare")
    data = make_data(tmp / "data", manifest=False)
    run(data, tmp / "out", vocab_size=VOCAB, tokenizer="bytes", stop_tokens=2 * UPDATE)
    return types.SimpleNamespace(data=data, out=tmp / "out")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainConfig) if field.name not in MACHINE])
def test_going_on_with_another_identity_key_is_refused_by_name(name, bare):
    before = {path.name: path.read_bytes() for path in bare.out.iterdir()}
    with pytest.raises(UserError) as error:
        run(bare.data, bare.out, **(dict(vocab_size=VOCAB, tokenizer="bytes") | {name: OTHER[name]}))
    said = str(error.value)
    assert said.startswith(f"{bare.out} holds a run with other settings: {name} = ") and f"now {OTHER[name]!r}; restore" in said
    assert said.count("now ") == 1  # that key and no other
    assert {path.name: path.read_bytes() for path in bare.out.iterdir()} == before


def test_a_run_without_a_checkpoint_is_begun_anew_but_another_is_not_put_in_its_place(data, solo, tmp_path, capfd):
    shutil.copytree(solo.out, tmp_path / "out")
    for path in (tmp_path / "out").glob("ckpt*.pt"):
        path.unlink()
    with pytest.raises(UserError, match="out holds a run with other settings: seed = .*, now 77; restore"):
        run(data, tmp_path / "out", seed=77)
    shutil.copytree(tmp_path / "out", tmp_path / "again")  # the refused one holds its lock as long as its error lives
    records = (tmp_path / "again" / "metrics.jsonl").read_bytes()
    (tmp_path / "again" / "metrics.lost.jsonl").write_text("lost before\n")
    assert_same_run(run(data, tmp_path / "again"), solo)
    assert (tmp_path / "again" / "metrics.lost.jsonl").read_bytes() == b"lost before\n" + records  # a finished run's: kept
    assert capfd.readouterr().err == f"warning: {tmp_path / 'again'} has no checkpoint: beginning anew; the records of the run before are in metrics.lost.jsonl\n"


def test_a_record_that_is_none_is_left_out(data, tmp_path):
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE)
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": "abc"}\n{"step": null}\n[1]\n7\n')
    assert [r["step"] for r in run(data, tmp_path / "out", stop_tokens=3 * UPDATE).train] == [1, 2, 3]


def test_going_on_with_other_machine_keys_is_the_same_run(data, solo, tmp_path):
    shutil.copytree(data.folder, tmp_path / "data")
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE)
    (tmp_path / "out").rename(tmp_path / "moved")
    changes = dict(data_dir=str(tmp_path / "data"), verify=True, stop_tokens=5 * UPDATE, milestones=(4 * UPDATE,), eval_interval=3, log_interval=2,
                   checkpoint_interval=1, checkpoint_minutes=7.0, out_dir=str(tmp_path / "moved"), device="auto" if not torch.cuda.is_available() else "cpu",
                   compile="auto", fused="false", micro_batch=2, wait=True, deterministic=True)  # fmt: skip
    assert changes.keys() == MACHINE
    rest = run(data, tmp_path / "moved", **changes)
    assert [r["loss"] for r in rest.train if r["step"] in (4, 5)] == pytest.approx(solo.losses[3:5], rel=1e-12)
    assert rest.state["step"] == 5 and train_ids(rest.reads) == train_ids(solo.reads)[16:40]


def test_going_on_with_other_data_is_refused(data, solo, tmp_path):
    """Also where only the content differs, and without a manifest."""
    for manifest in (True, False):
        tokens = {name: list(t) for name, t in data.tokens.items()}
        tokens["train_000001"][-1] = (tokens["train_000001"][-1] + 1) % VOCAB
        other = write_folder(tmp_path / f"data{manifest}", manifest=manifest, vocab_size=VOCAB, **tokens)
        with pytest.raises(UserError, match=r"solo holds a run with other settings: the data \(.*\); restore"):
            run(data, solo.out, data_dir=str(other), vocab_size=VOCAB, tokenizer="bytes")


def test_checkpoints_load_into_the_model_by_its_own_names(solo, data, tmp_path):
    """No _orig_mod., no module.; tensors and plain values only."""
    state = torch.load(solo.out / "ckpt.pt", weights_only=True)
    gpt = train.build_model(dataclasses.replace(config_for(data, tmp_path), vocab_size=VOCAB))
    assert list(state["model"]) == [name for name, _ in gpt.named_parameters()]
    gpt.load_state_dict(state["model"], strict=True)
    assert state["config"] == dataclasses.asdict(dataclasses.replace(config_for(data, solo.out), vocab_size=VOCAB, tokenizer="bytes"))


def test_tools_load_a_runs_model_by_its_folder(solo, tmp_path):
    gpt, state = load_run(solo.out)
    assert gpt.config.variant == "rd" and state["step"] == 6
    assert all(torch.equal(w, solo.state["model"][name].float()) for name, w in gpt.state_dict().items())
    with pytest.raises(UserError, match=r"nowhere: has no checkpoint \(ckpt\.pt\)"):
        load_run(tmp_path / "nowhere")
    save_checkpoint(tmp_path / "ckpt.pt", {**solo.state, "config": solo.state["config"] | {"d_model": 64}})
    with pytest.raises(UserError, match=r"ckpt\.pt does not fit model\.py: "):
        load_run(tmp_path)


def test_checkpoints_of_several_ranks_have_the_same_names(pair_of_ranks, solo):
    assert list(pair_of_ranks.state["model"]) == list(solo.state["model"])
    assert pair_of_ranks.state["optimizer"]["param_groups"][0]["params"] == solo.state["optimizer"]["param_groups"][0]["params"]


# ---- what users get wrong ----


def test_a_second_process_on_a_run_folder_is_refused_while_the_first_trains(data, tmp_path):
    lock = [sys.executable, "-c", "import sys; from lib.errors import or_exit; from lib.files import lock_folder; or_exit(lock_folder, sys.argv[1])", str(tmp_path / "out")]
    seen = []

    def second(split, read):
        if (split, read) == ("train", 3):
            seen.append(subprocess.run(lock, env={**ENV, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True))

    run(data, tmp_path / "out", second)
    assert seen[0].returncode == 2 and "out is in use by another process" in seen[0].stderr
    assert subprocess.run(lock, env={**ENV, "PYTHONPATH": str(ROOT)}).returncode == 0  # it is free once the run has ended


def test_a_run_waits_for_the_other_process_only_with_wait(data, tmp_path, capfd):
    """The other one holds the folder until its stdin closes."""
    (tmp_path / "out").mkdir()
    hold = "import sys; from lib.files import lock_folder; lock = lock_folder(sys.argv[1]); print('held', flush=True); sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "out")], env={**ENV, "PYTHONPATH": str(ROOT)}, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # fmt: skip
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="out is in use by another process; let it end"):
            run(data, tmp_path / "out")
        original, waited = warn, []

        def warn(message):  # said before it waits
            waited.append((message, (tmp_path / "out" / "config.json").exists()))
            other.stdin.close()

        warn = warn
        try:
            run(data, tmp_path / "out", wait=True)
        finally:
            warn = original
    assert len(waited) == 1 and "is in use by another process; waiting" in waited[0][0] and not waited[0][1]


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_windows_and_keeps_the_checkpoint(data, tmp_path, capfd):
    with pytest.raises(SystemExit) as exit:
        or_exit(train.main, config_for(data, tmp_path / "out", lr=1e300, grad_clip=0.0, checkpoint_interval=1), "tiny")
    assert exit.value.code == 2
    err = capfd.readouterr().err
    broken = result(tmp_path / "out")
    step = broken.state["step"] + 1
    ids = order(1, 6, 23)[step - 1]
    assert err.startswith(f"error: {tmp_path / 'out'}: update {step} is not finite (loss ") and f"window ids {ids};" in err and err.count("\n") == 1
    assert 1 < step < 6
    assert (broken.records[-1]["kind"], broken.records[-1]["step"]) == ("diverged", step)
    assert all(math.isfinite(loss) for loss in broken.losses)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(data, solo, tmp_path, monkeypatch):
    """The loss is finite; the gradient of one parameter is not, in update 3."""
    original, calls = train.torch.nn.utils.clip_grad_norm_, []

    def poisoned(parameters, limit):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) == 3:
            parameters[1].grad.view(-1)[0] = math.nan
        return original(parameters, limit)

    monkeypatch.setattr(train.torch.nn.utils, "clip_grad_norm_", poisoned)
    with pytest.raises(UserError, match=r"update 3 is not finite \(loss \d.*, gradient norm nan\)"):
        run(data, tmp_path / "out")
    monkeypatch.undo()
    gc.collect()
    assert result(tmp_path / "out").state["step"] == 2
    assert_same_run(run(data, tmp_path / "out"), solo)  # and the run goes on from there


def test_a_checkpoint_that_train_did_not_write_is_refused(data, solo, tmp_path):
    save_checkpoint(tmp_path / "ckpt.pt", {"model": solo.state["model"], "step": 3})
    with pytest.raises(UserError, match=r"ckpt\.pt has no config, data_id, optimizer: train\.py did not write it"):
        run(data, tmp_path)


@pytest.mark.parametrize("key, value", [("step", "x"), ("step", None), ("step", -3), ("step", 2.5), ("config", [1]), ("config", None), ("model", None), ("model", 5),
                                        ("optimizer", None), ("optimizer", {"state": {}, "param_groups": 5}), ("optimizer", "no moments"), ("optimizer", "short moments")])  # fmt: skip
def test_an_edited_checkpoint_is_refused_in_one_line(key, value, data, solo, tmp_path):
    if isinstance(value, str) and key == "optimizer":
        optimizer = {**solo.state["optimizer"]}
        rows = 3 if value == "short moments" else 0
        optimizer["state"] = {i: {name: t[:rows] if t.ndim == 2 else t for name, t in moments.items()} for i, moments in optimizer["state"].items()} if rows else {}
        value = optimizer
    save_checkpoint(tmp_path / "ckpt.pt", {**solo.state, key: value})
    before = (tmp_path / "ckpt.pt").read_bytes()
    with pytest.raises(UserError, match=rf"{tmp_path}/ckpt\.pt .*name another --out_dir") as error:
        run(data, tmp_path, stop_tokens=6 * UPDATE)
    assert "\n" not in str(error.value) and (tmp_path / "ckpt.pt").read_bytes() == before


def test_a_finished_run_whose_config_json_is_lost_gets_it_back(data, solo, tmp_path):
    for damage in (lambda path: path.unlink(), lambda path: path.write_text("")):
        shutil.copytree(solo.out, tmp_path / "out", dirs_exist_ok=True)
        damage(tmp_path / "out" / "config.json")
        run(data, tmp_path / "out")
        theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (solo.out, tmp_path / "out"))
        assert {**ours, "out_dir": ""} == {**theirs, "out_dir": ""}
        gc.collect()


def test_a_warm_up_as_long_as_the_schedule_is_one_warning(data, tmp_path, capfd):
    run(data, tmp_path / "out", warmup_tokens=6 * UPDATE)
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith(f"warning: config key warmup_tokens: {6 * UPDATE} covers all of max_tokens = {6 * UPDATE}")


def test_a_token_beyond_the_vocabulary_is_one_line_from_the_script(data, tmp_path):
    bad = write_folder(tmp_path / "data", vocab_size=VOCAB, **(data.tokens | {"train_000001": [VOCAB + 3] * (2 * CONTEXT)}))
    process = subprocess.run([sys.executable, ROOT / "train.py", *arguments(data, tmp_path / "out", data_dir=str(bad))], env=ENV, capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: rank 0, update ") and f"train_000001.bin: token 0 is {VOCAB + 3}, beyond the vocabulary of {VOCAB}" in process.stderr


def test_other_peoples_shards_train_as_they_are_with_one_warning(tmp_path, capfd):
    """As modded-nanogpt names them, and no manifest: GPT-2's vocabulary is taken."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "fineweb_train_000001.bin", rng.integers(50257, size=20 * CONTEXT).tolist())
    write_shard(tmp_path / "data" / "fineweb_val_000000.bin", rng.integers(50257, size=8 * CONTEXT).tolist())
    config = TrainConfig(**(TINY | dict(data_dir=str(tmp_path / "data"), out_dir=str(tmp_path / "out"), max_tokens=3 * UPDATE, dtype="float32")))
    assert train.main(config, "tiny") == 0
    err = capfd.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith("warning: ") and "no manifest.json: taking its tokens for gpt2's, vocabulary 50257" in err[0]
    done = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (done["tokenizer"], done["vocab_size"]) == ("gpt2", 50257)
    assert result(tmp_path / "out").state["model"]["tok_emb.weight"].shape[0] == 50304


def test_a_manifest_gives_vocabulary_and_tokenizer_and_contradicting_it_is_refused(data, tmp_path):
    for changes in (dict(vocab_size=VOCAB + 1), dict(tokenizer="gpt2")):
        (name,) = changes
        with pytest.raises(UserError, match=rf"^config key {name}: {changes[name]} but .*manifest\.json says"):
            run(data, tmp_path / "out", **changes)
    run(data, tmp_path / "out", vocab_size=VOCAB, tokenizer="bytes", max_tokens=2 * UPDATE, milestones=(UPDATE,))


@pytest.mark.parametrize("changes, message", [
    (dict(batch_tokens=UPDATE + 1), r"config key batch_tokens: 257 is not a multiple of 1 ranks x micro_batch 4 x context 32 = 128;"),
    (dict(micro_batch=3), r"config key batch_tokens: 256 is not a multiple of 1 ranks x micro_batch 3"),
    (dict(device="cuda:99"), "config key device: cuda:99 is not available here"),
    (dict(device="toaster"), "config key device: 'toaster' is none of auto, cpu, cuda"),
    (dict(variant="rdd"), "config: variant 'rdd' is none of prenorm, block, rd"),
    (dict(n_blocks=3), "config: n_blocks = 3 must divide"),
    (dict(n_head=3), "config: d_model = 32 must be n_head = 3 heads"),
    (dict(context=13 * CONTEXT, batch_tokens=13 * UPDATE, max_tokens=13 * UPDATE, milestones=()), "no val shard is longer than the context of 416"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_before_anything_is_written(changes, message, data, tmp_path):
    with pytest.raises(UserError, match=message):
        run(data, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_two_ranks_need_a_batch_that_both_share(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(UserError, match="is not a multiple of 2 ranks x micro_batch 8"):
        train.resolve(config_for(data, tmp_path, micro_batch=8), torch.device("cpu"), load_manifest(data.folder))


def test_a_run_folder_that_cannot_be_written_is_named(data, tmp_path):
    """A file in its place, a file above it, and one whose lock cannot be opened (root may write anywhere else)."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=rf"^out_dir: cannot create the folder {out}: .*; name another with --out_dir"):
            run(data, out)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "odd" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^cannot write in .*odd: "):
        run(data, tmp_path / "odd")


# ---- run as a script: train.py under observation ----


def main():
    """SPEC.json --key=value ...: run train.py as a script, and log to spec["log"] + RANK + ".json" its reads, the number of reads
    before each meeting of gradients, and its exit status. spec["sigterm"] = {"rank", "read"}: that rank sends itself SIGTERM at
    that read of training data. spec["sigkill"] = NAME: the process kills itself where it would rename a file to NAME."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", 0))
    log = {"synced_after_reads": []}
    replace = os.replace

    def before(split, read):
        if (split, rank, read) == ("train", *spec.get("sigterm", {"rank": -1, "read": -1}).values()):
            os.kill(os.getpid(), signal.SIGTERM)

    def watched_replace(source, target):
        if Path(target).name == spec.get("sigkill"):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    class Watched(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            def hook(group, bucket):
                if bucket.is_last():
                    log["synced_after_reads"].append(sum(split == "train" for split, _ in log["reads"]))
                return allreduce_hook(group, bucket)

            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, hook)

    torch.nn.parallel.DistributedDataParallel = Watched
    os.replace = watched_replace
    sys.argv = ["train.py", *sys.argv[2:]]
    with reading(before) as log["reads"]:
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as exit:
            log["status"] = exit.code
            raise
        finally:
            Path(f"{spec['log']}{rank}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
