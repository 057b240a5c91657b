"""Tiny runs of train.py: their config and data, running them under observation, comparing what they leave.

2 layers, 32 wide, float64, 6 updates of two passes. A run is bitwise repeatable, so most tests end alike: whatever
happened, the same command goes on and gives `solo`, the run that nothing happened to.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import torch
from helpers import ENV, ROOT, write_folder

import train
from lib.config import TrainConfig
from lib.run_folder import read_metrics
from lib.shards import SPLITS, Windows

CONTEXT, BATCH, VOCAB = 32, 8, 50  # BATCH: windows an update
UPDATE = BATCH * CONTEXT  # tokens an update
SHARDS = {
    "train_000000": 10 * CONTEXT + 6,
    "train_000001": 13 * CONTEXT + 21,
    "val_000000": 11 * CONTEXT + 1,
    "test_000000": 5 * CONTEXT + 9,
}
TINY = dict(
    n_layer=2,
    d_model=32,
    n_head=2,
    d_mlp=48,
    n_blocks=2,
    context=CONTEXT,
    norm_eps=1e-8,
    init_std=0.1,
    batch_tokens=UPDATE,
    micro_batch=4,
    max_tokens=6 * UPDATE,
    warmup_tokens=2 * UPDATE,
    lr=1e-2,
    min_lr_ratio=0.2,
    weight_decay=0.3,
    adam_eps=1e-3,  # so large that a wrong scale of the gradient shows
    grad_clip=0.5,
    eval_tokens=7 * CONTEXT,
    milestones=(3 * UPDATE,),
    log_interval=1,
    checkpoint_interval=2,
    device="cpu",
    dtype="float64",
    compile="false",
    reads="plain",
)


# ---- data and config -------------------------------------------------------------------------------------------------


def make_data(folder, **kwargs):
    """A folder of random shards, `.folder`, and what is in them, `.tokens`."""
    rng = np.random.default_rng(0)
    tokens = {name: rng.integers(VOCAB, size=size).tolist() for name, size in SHARDS.items()}
    return types.SimpleNamespace(folder=write_folder(folder, vocab_size=VOCAB, **kwargs, **tokens), tokens=tokens)


def config_for(data, out, **changes):
    return TrainConfig(**(TINY | dict(data_dir=str(data.folder), out_dir=str(out)) | changes))


def resolved(data, out, **changes):
    """config_for, with the vocabulary filled in as train.resolve does."""
    return dataclasses.replace(config_for(data, out, **changes), vocab_size=VOCAB)


def arguments(data, out, **changes):
    """The command line of a config."""
    config = dataclasses.asdict(config_for(data, out, **changes))
    return [f"--{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in config.items()]


# ---- running ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(before=None):
    """A list of (split, window ids) of every Windows.read meanwhile.

    before(split, number of this read of the split) is called first.
    """
    log, original = [], Windows.read

    def read(self, ids):
        split = next(split for split in SPLITS if split in self.paths[0].name)
        log.append((split, [int(i) for i in ids]))
        if before:
            before(split, sum(split == other for other, _ in log))
        return original(self, ids)

    Windows.read = read
    try:
        yield log
    finally:
        Windows.read = original


def train_ids(log):
    """The ids of all training windows that were read, in order."""
    return [i for split, ids in log if split == "train" for i in ids]


def run(data, out, before=None, status=0, **changes):
    """One run in this process -> its metrics, checkpoint and reads."""
    with reading(before) as log:
        assert train.main(config_for(data, out, **changes), "tiny") == status
    return result(out, log)


def observed(spec, tmp, *argv, ranks=1):
    """train.py in a process of its own, or under torchrun, observed as observe.py's `spec` says.

    Returns the finished process with `.logs`, what observe.py wrote for each rank, None where a rank wrote nothing.
    """
    path = tmp / "spec.json"
    path.write_text(json.dumps({"log": str(tmp / "log"), **spec}))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "tests" / "observe.py"), str(path), *argv]
    env = {**ENV, "PYTHONPATH": str(ROOT)} | spec.get("env", {})
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    logs = [tmp / f"log{rank}.json" for rank in range(ranks)]
    process.logs = [json.loads(log.read_text()) if log.exists() else None for log in logs]
    return process


# ---- what a run leaves -----------------------------------------------------------------------------------------------


def result(out, log=None):
    """Records, by kind too, and checkpoint of a run's folder."""
    records = read_metrics(Path(out) / "metrics.jsonl")
    of = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "test")}
    return types.SimpleNamespace(
        out=Path(out),
        reads=log,
        records=records,
        state=torch.load(Path(out) / "ckpt.pt", weights_only=True),
        losses=[r["loss"] for r in of["train"]],
        norms=[r["grad_norm"] for r in of["train"]],
        **of,
    )


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
