"""The promises that train.py keeps: data order, gradients over passes and ranks, evaluation, checkpoints, refusals.

What a run must give is computed by `reference`: plain loops over the tokens, with AdamW, clipping and schedule written
out. Of this repository it uses the model alone.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from helpers import ENV, MACHINE, ROOT, write_folder, write_shard
from tiny_runs import (
    BATCH,
    CONTEXT,
    TINY,
    UPDATE,
    VOCAB,
    arguments,
    assert_close,
    assert_same,
    assert_same_run,
    config_for,
    make_data,
    observed,
    resolved,
    result,
    run,
    train_ids,
    values,
)

import lib.files
import lib.run_folder
import model as model_py
import train
from lib.config import TrainConfig
from lib.devices import cpu_model, pick_compile, pick_dtype
from lib.errors import RankError, UserError, or_exit
from lib.files import lock_folder
from lib.run_folder import load_run, save_checkpoint
from lib.shards import Windows, load_manifest

pytestmark = pytest.mark.usefixtures("leave_no_trace")
CPU = torch.device("cpu")
KEYS = [field.name for field in dataclasses.fields(TrainConfig)]


@pytest.fixture(scope="module")
def pair_of_ranks(data, tmp_path_factory):
    """`solo` on two gloo ranks, two passes of two windows each. Rank 1 alone gets SIGTERM, in update 4 of 6."""
    tmp = tmp_path_factory.mktemp("ranks")
    spec = {"sigterm": {"rank": 1, "read": 2 * 3 + 1}, "out": str(tmp / "out")}
    process = observed(spec, tmp, *arguments(data, tmp / "out", variant="rd", micro_batch=2), ranks=2)
    return types.SimpleNamespace(process=process, logs=process.logs, **vars(result(tmp / "out")))


# ---- the reference ---------------------------------------------------------------------------------------------------


def cut(tokens, split):
    """All windows of a split, shard after shard."""
    shards = [t for name, t in sorted(tokens.items()) if name.startswith(split)]
    return [t[start : start + CONTEXT + 1] for t in shards for start in range(0, len(t) - CONTEXT, CONTEXT)]


def order(seed, n_updates, n_windows):
    """Window ids an update: one frozen numpy permutation an epoch, one after another."""
    epochs = range(n_updates * BATCH // n_windows + 1)
    stream = [int(i) for epoch in epochs for i in np.random.RandomState([seed, epoch]).permutation(n_windows)]
    return [stream[n * BATCH : (n + 1) * BATCH] for n in range(n_updates)]


def mean_nll(gpt, windows):
    """Mean over the windows, one at a time."""
    return sum(gpt(torch.tensor([w[:-1]]), torch.tensor([w[1:]]))[1] for w in windows) / len(windows)


def reference(data, n_updates, **changes):
    """The protocol in plain loops, float64: losses, gradient norms, rates, validation after each update, weights."""
    defaults = dict(seed=1, variant="rd", rope_theta=10000.0, betas=(0.9, 0.95), vocab_size=VOCAB)
    c = types.SimpleNamespace(**(TINY | defaults | changes))
    torch.manual_seed(c.seed)
    names = [field.name for field in dataclasses.fields(model_py.ModelConfig)]
    gpt = model_py.GPT(model_py.ModelConfig(**{name: getattr(c, name) for name in names})).double()
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
        warmup, end, final = c.warmup_tokens / UPDATE, c.max_tokens / UPDATE, c.min_lr_ratio * c.lr
        cosine = 0.5 * (1 + math.cos(math.pi * (n - warmup) / (end - warmup)))
        lr = c.lr * n / warmup if n < warmup else final + (c.lr - final) * cosine
        with torch.no_grad():
            for name, p in trained.items():
                g = gradients[name] * scale
                first[name] = c.betas[0] * first[name] + (1 - c.betas[0]) * g
                second[name] = c.betas[1] * second[name] + (1 - c.betas[1]) * g * g
                if p.ndim == 2:
                    p *= 1 - lr * c.weight_decay
                mean, square = first[name] / (1 - c.betas[0] ** n), second[name] / (1 - c.betas[1] ** n)
                p -= lr * mean / (square.sqrt() + c.adam_eps)
            out.val.append(mean_nll(gpt, val).item())
        out.losses.append(loss.item())
        out.norms.append(norm)
        out.lrs.append(lr)
    out.weights = gpt.state_dict()
    return out


@pytest.fixture(scope="module")
def expected(data):
    return reference(data, 6)


# ---- the schedule ----------------------------------------------------------------------------------------------------


def test_step_n_means_after_exactly_n_updates_and_a_last_batch_that_is_not_full_counts():
    config = TrainConfig(batch_tokens=100, max_tokens=1000, warmup_tokens=0, milestones=())
    assert [train.updates(tokens, config) for tokens in (1, 99, 100, 101, 900, 901, 1000)] == [1, 1, 1, 2, 9, 10, 10]


def rates(**changes):
    keys = dict(batch_tokens=100, max_tokens=2000, warmup_tokens=500, lr=0.8, min_lr_ratio=0.25, milestones=())
    config = TrainConfig(**(keys | changes))
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


# ---- what a run computes ---------------------------------------------------------------------------------------------


def test_loss_gradient_norm_rate_and_weights_are_the_protocols(solo, expected):
    """Six updates over two epochs of two shards, two passes each, against plain loops.

    Scale of the gradient, clipping, weight decay, rate and AdamW's constants all show in the weights.
    """
    assert [r["step"] for r in solo.train] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in solo.train] == [UPDATE * n for n in range(1, 7)]
    assert max(expected.norms) > TINY["grad_clip"] * 1.5  # clipping bites
    assert solo.losses == pytest.approx(expected.losses, rel=1e-12)
    assert solo.norms == pytest.approx(expected.norms, rel=1e-10)
    assert [r["lr"] for r in solo.train] == pytest.approx(expected.lrs, rel=1e-12)
    assert_close(solo.state["model"], expected.weights)


@pytest.mark.parametrize(
    "variant, changes",
    [
        ("block", dict(grad_clip=0.0)),
        ("frozen_v", dict(seed=2, reads="cpu")),
        ("prenorm", dict(weight_decay=0.0, n_layer=3)),
    ],
)
def test_other_variants_and_settings_too(variant, changes, data, tmp_path):
    keys = dict(variant=variant, max_tokens=3 * UPDATE) | changes
    ours, theirs = run(data, tmp_path / "out", **keys), reference(data, 3, **keys)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)
    assert_close(ours.state["model"], theirs.weights)


def test_the_number_of_passes_changes_nothing(data, solo, tmp_path):
    """One pass of 8 windows, two of 4 (`solo`), eight of 1: the same update."""
    for micro_batch in (8, 1):
        other = run(data, tmp_path / str(micro_batch), micro_batch=micro_batch)
        assert train_ids(other.reads) == train_ids(solo.reads)
        assert other.losses == pytest.approx(solo.losses, rel=1e-12)
        assert other.norms == pytest.approx(solo.norms, rel=1e-10)
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
    as_resolved = dict(vocab_size=VOCAB, tokenizer="bytes", variant="rd", seed=1)
    run_facts = dict(n_params=sum(w.numel() for w in solo.state["model"].values()), data_id=solo.state["data_id"])
    machine = dict(world=1, torch=torch.__version__, cpu=cpu_model(), threads=torch.get_num_threads())
    assert config | as_resolved | run_facts | machine == config and config["cpu"]


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


def test_the_run_folder_is_named_after_config_variant_and_seed(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_config = config_for(data, "", variant="block", seed=3, max_tokens=2 * UPDATE, milestones=(UPDATE,))
    assert train.main(run_config, "tiny") == 0
    names = {path.name for path in (tmp_path / "out/tiny/block-s3").iterdir()}
    assert names == {".lock", "ckpt.pt", "config.json", "metrics.jsonl"}


def test_the_first_line_says_the_backend_of_the_reads_and_whether_the_model_is_compiled(data, tmp_path, capfd):
    keys = dict(max_tokens=UPDATE, warmup_tokens=0, milestones=())
    for reads in ("plain", "cpu"):
        run(data, tmp_path / reads, reads=reads, **keys)
        line = capfd.readouterr().out.splitlines()[0]
        assert f" parameters, cpu, float64, {reads} reads, not compiled, 1 rank(s) x 2 passes x 4 x 32 tokens" in line


def test_bfloat16_is_an_autocast_over_float32_weights(data, tmp_path):
    wide = run(data, tmp_path / "wide", dtype="float32")
    half = run(data, tmp_path / "half", dtype="bfloat16")
    for done in (half, wide):
        assert {w.dtype for w in done.state["model"].values()} == {torch.float32}
    assert half.losses != wide.losses and half.losses == pytest.approx(wide.losses, rel=2e-2)
    assert half.eval[0]["val_nll"] != wide.eval[0]["val_nll"]


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["rd", "frozen_v", "q_k_v", "prenorm"])
def test_weight_decay_shrinks_matrices_only_never_queries_or_gains(variant, data, tmp_path):
    """One step at zero gradients: matrices shrink by exactly 1 - lr * weight_decay, all else stays as it was."""
    config = resolved(data, tmp_path, variant=variant)
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
        vector = name.endswith(("norm.weight", "query", "query_v", "query_k"))
        factor = 1 if vector else 1 - TINY["lr"] * TINY["weight_decay"]
        torch.testing.assert_close(p, before[name] * factor, rtol=0 if vector else 1e-12, atol=0)
    frozen = [name for name, p in gpt.named_parameters() if not p.requires_grad]
    assert frozen == (["layers.0.attn_read.query_v", "layers.1.attn_read.query_v"] if variant == "frozen_v" else [])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in gpt.parameters() if p.requires_grad} == {id(p) for p in optimizer.state}


def test_frozen_queries_stay_zero_and_have_no_optimizer_state(data, tmp_path):
    frozen = run(data, tmp_path / "out", variant="frozen_v")
    queries = [w for name, w in frozen.state["model"].items() if name.endswith("query_v")]
    assert len(queries) == 2 and not any(w.any() for w in queries)
    assert len(frozen.state["optimizer"]["state"]) == len(frozen.state["model"]) - 2


# ---- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_are_the_same_run_as_one(pair_of_ranks, solo):
    """Losses, gradient norms, validation and records are those of the global batch."""
    assert [r["step"] for r in pair_of_ranks.train] == [1, 2, 3, 4]
    assert pair_of_ranks.losses == pytest.approx(solo.losses[:4], rel=1e-12)
    assert pair_of_ranks.norms == pytest.approx(solo.norms[:4], rel=1e-10)
    assert [r["step"] for r in pair_of_ranks.eval] == [3]
    assert pair_of_ranks.eval[0]["val_nll"] == pytest.approx(solo.eval[0]["val_nll"], rel=1e-12)


@pytest.mark.slow
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


@pytest.mark.slow
def test_gradients_meet_once_an_update_after_its_last_pass(pair_of_ranks):
    for log in pair_of_ranks.logs:
        assert log["synced_after_reads"] == [2, 4, 6, 8]


@pytest.mark.slow
def test_one_rank_told_to_stop_stops_all_and_another_number_of_ranks_goes_on(pair_of_ranks, solo, data, tmp_path):
    said = pair_of_ranks.process
    assert "exitcode  : 75" in said.stderr and said.stdout.count("told to stop; saved at step 4") == 1
    assert said.returncode and [log["status"] for log in pair_of_ranks.logs] == [75, 75]
    assert pair_of_ranks.state["step"] == 4
    shutil.copytree(pair_of_ranks.out, tmp_path / "out")
    rest = run(data, tmp_path / "out")
    assert train_ids(rest.reads) == train_ids(solo.reads)[32:]
    assert rest.losses == pytest.approx(solo.losses, rel=1e-12)
    assert_close(rest.state["model"], solo.state["model"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_window_is_reported_by_the_rank_that_met_it(rank, data, tmp_path, monkeypatch):
    """Also in an evaluation: the others only wait for that rank, and are stopped."""
    tokens = dict(train_0=data.tokens["train_000000"], val_0=[VOCAB] * (4 * CONTEXT + 1))
    bad = write_folder(tmp_path / "data", vocab_size=VOCAB, **tokens)
    config = resolved(data, tmp_path / "out", data_dir=str(bad), micro_batch=1)
    monkeypatch.setattr(train, "RANK", rank)
    monkeypatch.setattr(train, "WORLD", 2)
    gpt = train.build_model(config)
    said = rf"rank {rank}, evaluation: .*val_0\.bin: token {rank * CONTEXT} is {VOCAB}, beyond the vocabulary"
    with pytest.raises(RankError, match=said):
        train.evaluate(gpt, Windows(bad, "val", CONTEXT, VOCAB), config, CPU, contextlib.nullcontext)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluations_come_at_milestones_and_the_end_after_exactly_that_many_updates(data, solo, expected, tmp_path):
    assert [(r["step"], r["tokens"]) for r in solo.eval] == [(3, 3 * UPDATE), (6, 6 * UPDATE)]
    assert [r["val_nll"] for r in solo.eval] == pytest.approx([expected.val[2], expected.val[5]], rel=1e-12)
    other = run(data, tmp_path / "out", milestones=(1, UPDATE + 1, 4 * UPDATE))
    assert [r["step"] for r in other.eval] == [1, 2, 4, 6]
    eighths = run(data, tmp_path / "eighths", milestones=(), max_tokens=16 * UPDATE)
    assert [r["step"] for r in eighths.eval] == [2, 4, 8, 16]


def test_the_value_does_not_depend_on_passes_or_ranks(data, tmp_path, monkeypatch):
    """7 windows: no number of rows but 1 divides them. Two ranks are summed by hand."""
    base = resolved(data, tmp_path)
    gpt = train.build_model(base)
    windows = Windows(data.folder, "val", CONTEXT, VOCAB)
    val = cut(data.tokens, "val")
    with torch.no_grad():
        expected = mean_nll(gpt, [val[i * 11 // 7] for i in range(7)]).item()

    def value(micro_batch):
        config = dataclasses.replace(base, micro_batch=micro_batch)
        return train.evaluate(gpt, windows, config, CPU, contextlib.nullcontext)

    assert [value(m) for m in (1, 2, 3, 7, 8, 16)] == pytest.approx([expected] * 6, rel=1e-12)
    monkeypatch.setattr(train, "WORLD", 2)
    for micro_batch in (1, 3, 8):
        sums = []
        monkeypatch.setattr(train, "all_reduce", lambda values, device, sums=sums: sums.append(values) or [1.0, 1.0])
        for rank in (0, 1):
            monkeypatch.setattr(train, "RANK", rank)
            value(micro_batch)
        total, count = map(sum, zip(*sums))
        assert (total / count, count) == (pytest.approx(expected, rel=1e-12), 7)


def test_evaluating_touches_no_generator_and_tracks_no_gradient(data, tmp_path):
    config = resolved(data, tmp_path)
    gpt = train.build_model(config)
    generators, tracked = [torch.get_rng_state(), np.random.get_state()], []
    gpt.register_forward_hook(lambda module, inputs, outputs: tracked.append(outputs[1].requires_grad))
    train.evaluate(gpt, Windows(data.folder, "val", CONTEXT, VOCAB), config, CPU, contextlib.nullcontext)
    assert torch.equal(torch.get_rng_state(), generators[0])
    np.testing.assert_equal(np.random.get_state(), generators[1])
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
    gpt = train.build_model(resolved(data, tmp_path))
    gpt.load_state_dict(solo.state["model"])
    with torch.no_grad():
        assert solo.test[0]["test_nll"] == pytest.approx(mean_nll(gpt, cut(data.tokens, "test")).item(), rel=1e-12)
    again = copy_and_run(solo, data, tmp_path)
    assert not again.reads


def test_without_a_test_split_a_run_ends_without_one(data, tmp_path):
    tokens = dict(train_0=data.tokens["train_000000"], val_0=data.tokens["val_000000"])
    plain = write_folder(tmp_path / "data", vocab_size=VOCAB, **tokens)
    assert not run(data, tmp_path / "out", data_dir=str(plain), max_tokens=3 * UPDATE).test


# ---- compile ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def graphs():
    """Counts what torch.compile traces meanwhile, in a state of its own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield torch._dynamo.utils.counters
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["plain", "cpu"])
def test_compiling_gives_the_same_run(reads, data, solo, tmp_path, monkeypatch, capfd):
    """The model is one graph to train and one to evaluate, whose last pass is short.

    Traced, but not compiled by a C++ compiler: float64 stays exact, and it is quick.
    """
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile(*args, **options, backend="aot_eager"))
    with graphs() as counters:
        traced = run(data, tmp_path / "out", compile="true", reads=reads)
        assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert f"{reads} reads, compiled" in capfd.readouterr().out
    assert traced.losses == pytest.approx(solo.losses, rel=1e-12)
    assert [r["val_nll"] for r in traced.eval] == pytest.approx([r["val_nll"] for r in solo.eval], rel=1e-12)
    assert_close(traced.state["model"], solo.state["model"])  # the same names, too: no _orig_mod.


@pytest.mark.slow
def test_compiled_and_not_agree(data, tmp_path, monkeypatch):
    """In earnest, in float32. Training alone and one block: compiling is slow."""
    monkeypatch.setattr(train, "evaluate", lambda *arguments: 0.0)
    tiny = dict(dtype="float32", n_layer=1, n_blocks=1)
    plain = run(data, tmp_path / "plain", **tiny)
    with graphs() as counters:
        compiled = run(data, tmp_path / "compiled", compile="true", **tiny)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_close(compiled.state["model"], plain.state["model"], 1e-4)


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_compile_on_a_cpu_without_a_compiler_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="^config key compile: on a CPU torch.compile needs a C.*; use --compile=false"):
        run(data, tmp_path / "out", compile="true")
    assert not pick_compile(config_for(data, tmp_path, compile="auto"), CPU)
    assert pick_compile(config_for(data, tmp_path, compile="auto"), torch.device("cuda"))
    assert not pick_compile(config_for(data, tmp_path, compile="false"), torch.device("cuda"))


def test_a_precision_that_the_device_lacks_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    for device, dtype in (("cuda", "bfloat16"), ("mps", "float64")):
        with pytest.raises(UserError, match="^config key dtype: .*use --dtype=float32"):
            pick_dtype(config_for(data, tmp_path, dtype=dtype), torch.device(device))
    assert pick_dtype(config_for(data, tmp_path, dtype="float64"), CPU) == "float64"
    assert pick_dtype(config_for(data, tmp_path, dtype="auto"), CPU) == "float32"


# ---- stopping and going on -------------------------------------------------------------------------------------------


def copy_and_run(finished, data, tmp, **changes):
    shutil.copytree(finished.out, tmp / "copy")
    return run(data, tmp / "copy", **changes)


def stop_in_update_3(number):
    """For run(before=...): the process gets the signal `number` in the second pass of update 3."""

    def stop(split, read):
        if (split, read) == ("train", 6):
            os.kill(os.getpid(), number)

    return stop


@pytest.mark.parametrize("reads, number", [("plain", signal.SIGTERM), ("cpu", signal.SIGINT)])
def test_told_to_stop_a_run_saves_and_goes_on_bitwise_as_if_it_had_not_been(reads, number, data, tmp_path, capfd):
    whole = run(data, tmp_path / "whole", reads=reads)
    first = run(data, tmp_path / "out", stop_in_update_3(number), status=75, reads=reads)
    assert first.state["step"] == 3 and len(first.losses) == 3
    assert "told to stop; saved at step 3: run the same command to go on" in capfd.readouterr().out
    rest = run(data, tmp_path / "out", reads=reads)
    assert train_ids(first.reads) + train_ids(rest.reads) == train_ids(whole.reads)
    assert_same_run(rest, whole)


def test_a_stop_changes_no_record_whatever_the_log_interval(data, tmp_path):
    whole = run(data, tmp_path / "whole", log_interval=5)
    run(data, tmp_path / "out", stop_in_update_3(signal.SIGTERM), status=75, log_interval=5)
    assert_same_run(run(data, tmp_path / "out", log_interval=5), whole)


@pytest.mark.slow
def test_sigterm_ends_the_script_with_75(data, tmp_path):
    spec = {"sigterm": {"rank": 0, "read": 5}}
    told = observed(spec, tmp_path, *arguments(data, tmp_path / "out"))
    assert (told.returncode, told.stderr) == (75, "") and "told to stop; saved at step 3" in told.stdout
    assert result(tmp_path / "out").state["step"] == 3


def test_a_finished_run_run_again_does_nothing(data, solo, tmp_path, capfd):
    shutil.copytree(solo.out, tmp_path / "out")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()}
    again = run(data, tmp_path / "out")
    assert again.reads == [] and "finished: 6 updates" in capfd.readouterr().out
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    "interval, minutes, at",
    [(0, 1000, [6]), (0, 1e-9, [1, 2, 3, 4, 5, 6]), (4, 1000, [4, 6]), (0, 1, [2, 4, 6])],
)
def test_checkpoints_come_by_the_clock_or_by_the_update(interval, minutes, at, data, solo, tmp_path, monkeypatch):
    """Whenever they come, the run is the same. In the last case an update takes 30.5 seconds."""
    saves, now = [], [0.0]

    def save(path, state):
        saves.append(state["step"])
        save_checkpoint(path, state)

    monkeypatch.setattr(lib.run_folder, "save_checkpoint", save)
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
    shares = re.search(r"finished: updates 0 to 6 in \d:\d\d:\d\d; evaluation (\S+)%, checkpoints (\S+)%", out)
    assert all(float(share) > 0 for share in shares.groups()) and sum(map(float, shares.groups())) < 100


def test_a_run_stopped_by_stop_tokens_goes_on_when_they_are_raised(data, solo, tmp_path):
    """On the same schedule; its own end is evaluated too."""
    first = run(data, tmp_path / "out", stop_tokens=3 * UPDATE - 1, milestones=(6 * UPDATE,))
    assert first.state["step"] == 3 and [r["step"] for r in first.eval] == [r["step"] for r in first.test] == [3]
    assert first.losses == solo.losses[:3] and first.eval[0] == solo.eval[0]
    rest = run(data, tmp_path / "out", stop_tokens=0)
    assert train_ids(rest.reads) == train_ids(solo.reads)[24:]
    assert values([r for r in rest.records if (r["kind"], r["step"]) != ("test", 3)]) == values(solo.records)
    assert_same(rest.state["optimizer"], solo.state["optimizer"])
    assert_same(rest.state["model"], solo.state["model"])


def test_metrics_hold_each_step_once_after_a_fall_back_to_an_older_checkpoint(data, solo, tmp_path, capfd):
    """A checkpoint that is cut short, or altered inside, is named in a warning, and the one before it used."""
    whole = (solo.out / "ckpt.pt").read_bytes()
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 255
    for name, damaged in {"short": whole[:-100], "empty": b"", "altered": altered}.items():
        out = tmp_path / name
        shutil.copytree(solo.out, out)
        (out / "ckpt.pt").write_bytes(damaged)
        capfd.readouterr()
        rest = run(data, out)
        (warning,) = capfd.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {out / 'ckpt.pt'} is damaged (")
        assert train_ids(rest.reads) == train_ids(solo.reads)[32:]  # from step 4
        assert_same_run(rest, solo)
        steps = [(r["kind"], r["step"]) for r in rest.records]
        assert len(steps) == len(set(steps))


# one more value of every key that is part of a run's identity; each gives a valid config
OTHER = dict(
    variant="block",
    vocab_size=60,
    n_layer=3,
    n_head=4,
    d_model=36,
    d_mlp=40,
    context=16,
    n_blocks=4,
    norm_eps=1e-6,
    rope_theta=100.0,
    init_std=0.2,
    tokenizer="gpt2",
    seed=2,
    batch_tokens=2 * UPDATE,
    max_tokens=7 * UPDATE,
    warmup_tokens=UPDATE,
    lr=2e-2,
    min_lr_ratio=0.3,
    weight_decay=0.2,
    betas=(0.8, 0.95),
    adam_eps=1e-4,
    grad_clip=1.0,
    eval_tokens=8 * CONTEXT,
    dtype="float32",
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Data without a manifest, where vocabulary and tokenizer are the user's, and a run on them, stopped."""
    tmp = tmp_path_factory.mktemp("bare")
    data = make_data(tmp / "data", manifest=False)
    run(data, tmp / "out", vocab_size=VOCAB, tokenizer="bytes", stop_tokens=2 * UPDATE)
    return types.SimpleNamespace(data=data, out=tmp / "out")


@pytest.mark.parametrize("name", sorted(set(KEYS) - MACHINE))
def test_going_on_with_another_identity_key_is_refused_by_name(name, bare):
    before = {path.name: path.read_bytes() for path in bare.out.iterdir()}
    with pytest.raises(UserError) as error:
        run(bare.data, bare.out, **(dict(vocab_size=VOCAB, tokenizer="bytes") | {name: OTHER[name]}))
    said = str(error.value)
    assert said.startswith(f"{bare.out} holds a run with other settings: {name} = ")
    assert f"now {OTHER[name]!r}; restore" in said and said.count("now ") == 1  # that key and no other
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
    lost = tmp_path / "again" / "metrics.lost.jsonl"
    assert lost.read_bytes() == b"lost before\n" + records  # a finished run's: kept
    said = f"{lost.parent} has no checkpoint: beginning anew; the records of the run before are in {lost.name}"
    assert capfd.readouterr().err == f"warning: {said}\n"


def test_a_record_that_is_none_is_left_out(data, tmp_path):
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE)
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": "abc"}\n{"step": null}\n[1]\n7\n')
    assert [r["step"] for r in run(data, tmp_path / "out", stop_tokens=3 * UPDATE).train] == [1, 2, 3]


def test_going_on_with_other_machine_keys_is_the_same_run(data, solo, tmp_path):
    shutil.copytree(data.folder, tmp_path / "data")
    run(data, tmp_path / "out", stop_tokens=2 * UPDATE)
    (tmp_path / "out").rename(tmp_path / "moved")
    changes = dict(
        data_dir=str(tmp_path / "data"),
        verify=True,
        stop_tokens=5 * UPDATE,
        milestones=(4 * UPDATE,),
        eval_interval=3,
        log_interval=2,
        checkpoint_interval=1,
        checkpoint_minutes=7.0,
        out_dir=str(tmp_path / "moved"),
        device="cpu" if torch.cuda.is_available() else "auto",
        compile="auto",
        reads="cpu",
        micro_batch=2,
        wait=True,
        deterministic=True,
    )
    assert changes.keys() == MACHINE
    rest = run(data, tmp_path / "moved", **changes)
    losses = [r["loss"] for r in rest.train if r["step"] in (4, 5)]
    assert losses == pytest.approx(solo.losses[3:5], rel=1e-12)
    assert rest.state["step"] == 5 and train_ids(rest.reads) == train_ids(solo.reads)[16:40]


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_run_of_the_code_that_had_the_key_fused_goes_on_by_the_same_rules(with_checkpoint, data, solo, tmp_path):
    """config.json and checkpoint of that time have `fused`, a machine key, and no `reads`, `cpu` or `threads`."""
    out = tmp_path / "out"
    run(data, out, stop_in_update_3(signal.SIGTERM), status=75)

    def as_then(config):
        gone = ("reads", "cpu", "threads")
        return {name: value for name, value in config.items() if name not in gone} | {"fused": "auto"}

    config, state = json.loads((out / "config.json").read_text()), result(out).state
    (out / "config.json").write_text(json.dumps(as_then(config), indent=1))
    for path in out.glob("ckpt*.pt"):
        path.unlink()
    if with_checkpoint:
        save_checkpoint(out / "ckpt.pt", {**state, "config": as_then(state["config"])})
    shutil.copytree(out, tmp_path / "other")
    with pytest.raises(UserError, match=r"other holds a run with other settings: lr = 0\.01, now 0\.02; restore"):
        run(data, tmp_path / "other", lr=0.02)
    rest = run(data, out)
    assert train_ids(rest.reads) == train_ids(solo.reads)[24 if with_checkpoint else 0 :]
    assert_same_run(rest, solo)
    assert config.keys() == json.loads((out / "config.json").read_text()).keys()


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
    gpt = train.build_model(resolved(data, tmp_path))
    assert list(state["model"]) == [name for name, _ in gpt.named_parameters()]
    gpt.load_state_dict(state["model"], strict=True)
    assert state["config"] == dataclasses.asdict(dataclasses.replace(resolved(data, solo.out), tokenizer="bytes"))


def test_tools_load_a_runs_model_by_its_folder(solo, tmp_path):
    gpt, state = load_run(solo.out)
    assert gpt.config.variant == "rd" and state["step"] == 6
    assert all(torch.equal(w, solo.state["model"][name].float()) for name, w in gpt.state_dict().items())
    with pytest.raises(UserError, match=r"nowhere: has no checkpoint \(ckpt\.pt\)"):
        load_run(tmp_path / "nowhere")
    save_checkpoint(tmp_path / "ckpt.pt", {**solo.state, "config": solo.state["config"] | {"d_model": 64}})
    with pytest.raises(UserError, match=r"ckpt\.pt does not fit model\.py: "):
        load_run(tmp_path)


@pytest.mark.slow
def test_checkpoints_of_several_ranks_have_the_same_names(pair_of_ranks, solo):
    assert list(pair_of_ranks.state["model"]) == list(solo.state["model"])
    groups = [done.state["optimizer"]["param_groups"] for done in (pair_of_ranks, solo)]
    assert [group["params"] for group in groups[0]] == [group["params"] for group in groups[1]]


# ---- what users get wrong --------------------------------------------------------------------------------------------


# train.lock_folder in a process of its own: it says "held", and holds the folder until its stdin closes
HOLD = """
import sys
from lib.errors import or_exit
from lib.files import lock_folder

lock = or_exit(lock_folder, sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
"""


def holding(folder):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", HOLD, folder], env={**ENV, "PYTHONPATH": str(ROOT)}, **pipes)


def test_a_second_process_on_a_run_folder_is_refused_while_the_first_trains(data, tmp_path):
    seen = []

    def second(split, read):
        if (split, read) == ("train", 3):
            other = holding(tmp_path / "out")
            seen.append((*other.communicate(), other.returncode))

    run(data, tmp_path / "out", second)
    ((out, err, status),) = seen
    assert (out, status) == ("", 2) and "out is in use by another process" in err
    lock_folder(tmp_path / "out").close()  # it is free once the run has ended


def test_a_run_waits_for_the_other_process_only_with_wait(data, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    with holding(tmp_path / "out") as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="out is in use by another process; let it end"):
            run(data, tmp_path / "out")
        waited = []

        def warn(message):  # said before it waits
            waited.append((message, (tmp_path / "out" / "config.json").exists()))
            other.stdin.close()

        monkeypatch.setattr(lib.files, "warn", warn)
        run(data, tmp_path / "out", wait=True)
    ((message, written),) = waited
    assert "is in use by another process; waiting" in message and not written


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_windows_and_keeps_the_checkpoint(data, tmp_path, capfd):
    with pytest.raises(SystemExit) as exit:
        or_exit(train.main, config_for(data, tmp_path / "out", lr=1e300, grad_clip=0.0, checkpoint_interval=1), "tiny")
    assert exit.value.code == 2
    err = capfd.readouterr().err
    broken = result(tmp_path / "out")
    step = broken.state["step"] + 1
    ids = order(1, 6, 23)[step - 1]
    assert err.startswith(f"error: {tmp_path / 'out'}: update {step} is not finite (loss ") and err.count("\n") == 1
    assert f"window ids {ids};" in err and "the last checkpoint is intact" in err
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


@pytest.mark.parametrize(
    "key, value",
    [
        ("step", "x"),
        ("step", None),
        ("step", -3),
        ("step", 2.5),
        ("config", [1]),
        ("config", None),
        ("model", None),
        ("model", 5),
        ("optimizer", None),
        ("optimizer", {"state": {}, "param_groups": 5}),
        ("moments", 0),  # so many rows of each matrix are left
        ("moments", 3),
    ],
)
def test_an_edited_checkpoint_is_refused_in_one_line(key, value, data, solo, tmp_path):
    if key == "moments":
        state = solo.state["optimizer"]["state"]
        short = {
            i: {name: t[:value] if t.ndim == 2 else t for name, t in moments.items()} for i, moments in state.items()
        }
        key, value = "optimizer", solo.state["optimizer"] | {"state": short if value else {}}
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
    covers = f"{6 * UPDATE} covers all of max_tokens = {6 * UPDATE}"
    said = f"warning: config key warmup_tokens: {covers}: the rate will not fall again\n"
    assert capfd.readouterr().err == said


@pytest.mark.slow
def test_a_token_beyond_the_vocabulary_is_one_line_from_the_script(data, tmp_path):
    tokens = data.tokens | {"train_000001": [VOCAB + 3] * (2 * CONTEXT)}
    bad = write_folder(tmp_path / "data", vocab_size=VOCAB, **tokens)
    command = [sys.executable, ROOT / "train.py", *arguments(data, tmp_path / "out", data_dir=str(bad))]
    process = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: rank 0, update ")
    assert f"train_000001.bin: token 0 is {VOCAB + 3}, beyond the vocabulary of {VOCAB}" in process.stderr


def test_other_peoples_shards_train_as_they_are_with_one_warning(tmp_path, capfd):
    """As modded-nanogpt names them, and no manifest: GPT-2's vocabulary is taken."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "fineweb_train_000001.bin", rng.integers(50257, size=20 * CONTEXT).tolist())
    write_shard(tmp_path / "data" / "fineweb_val_000000.bin", rng.integers(50257, size=8 * CONTEXT).tolist())
    theirs = types.SimpleNamespace(folder=tmp_path / "data")
    run(theirs, tmp_path / "out", max_tokens=3 * UPDATE, dtype="float32")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: ")
    assert "no manifest.json: taking its tokens for gpt2's, vocabulary 50257" in warning
    done = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (done["tokenizer"], done["vocab_size"]) == ("gpt2", 50257)
    assert result(tmp_path / "out").state["model"]["tok_emb.weight"].shape[0] == 50304


def test_a_manifest_gives_vocabulary_and_tokenizer_and_contradicting_it_is_refused(data, tmp_path):
    for changes in (dict(vocab_size=VOCAB + 1), dict(tokenizer="gpt2")):
        (name,) = changes
        with pytest.raises(UserError, match=rf"^config key {name}: {changes[name]} but .*manifest\.json says"):
            run(data, tmp_path / "out", **changes)
    run(data, tmp_path / "out", vocab_size=VOCAB, tokenizer="bytes", max_tokens=2 * UPDATE, milestones=(UPDATE,))


TOO_LONG = dict(context=13 * CONTEXT, batch_tokens=13 * UPDATE, max_tokens=13 * UPDATE, milestones=())


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(batch_tokens=UPDATE + 1),
            "config key batch_tokens: 257 is not a multiple of 1 ranks x micro_batch 4 x context 32 = 128;",
        ),
        (dict(micro_batch=3), "config key batch_tokens: 256 is not a multiple of 1 ranks x micro_batch 3"),
        (dict(device="cuda:99"), "config key device: cuda:99 is not available here"),
        (dict(device="toaster"), "config key device: 'toaster' is none of auto, cpu, cuda"),
        (dict(variant="rdd"), "config: variant 'rdd' is none of prenorm, block, rd"),
        (dict(n_blocks=3), "config: n_blocks = 3 must divide"),
        (dict(n_head=3), "config: d_model = 32 must be n_head = 3 heads"),
        (dict(reads="cpu", dtype="bfloat16"), "config key reads: cpu is for float32 and float64"),
        (TOO_LONG, "no val shard is longer than the context of 416"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_anything_is_written(changes, message, data, tmp_path):
    with pytest.raises(UserError, match=message):
        run(data, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_two_ranks_need_a_batch_that_both_share(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "WORLD", 2)
    config = config_for(data, tmp_path, micro_batch=8)
    with pytest.raises(UserError, match="is not a multiple of 2 ranks x micro_batch 8"):
        train.resolve(config, CPU, load_manifest(data.folder))


def test_a_run_folder_that_cannot_be_written_is_named(data, tmp_path):
    """A file in its place, a file above it, and one whose lock cannot be opened (root may write anywhere else)."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            UserError, match=rf"^out_dir: cannot create the folder {out}: .*; name another with --out_dir"
        ):
            run(data, out)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "odd" / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^cannot write in .*odd: "):
        run(data, tmp_path / "odd")
