"""Run folders written by hand, and models with random routes: what the tests of a diagnosis share."""

import dataclasses
import json

import torch

from lib.config import TrainConfig
from lib.run_folder import save_checkpoint
from lib.shards import check_data
from model import GPT, ModelConfig

SIZES = dict(vocab_size=97, n_layer=3, n_head=2, d_model=8, d_mlp=8, context=16, n_blocks=3)
B = 1000  # tokens an update
MILESTONES = (2 * B, 4 * B, 8 * B)


def random_gpt(variant, seed=0, **sizes):
    """A GPT whose route queries are drawn from N(0, 1)."""
    torch.manual_seed(seed)
    gpt = GPT(ModelConfig(variant=variant, **{**SIZES, **sizes}))
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if "query" in name and parameter.requires_grad:
                parameter.normal_(0, 1)
    return gpt


def record(kind, tokens, **values):
    """A line of metrics.jsonl."""
    return json.dumps({"kind": kind, "step": tokens // B, "tokens": tokens, **values}) + "\n"


def write_run(root, data, variant, seed, nlls, test=None, checkpoint=None, lines=(), **keys):
    """A run folder as train.py leaves it, its validation NLLs at the milestones; returns its path."""
    schedule = dict(batch_tokens=B, max_tokens=8 * B, warmup_tokens=B, milestones=MILESTONES, data_dir=str(data))
    keys = {**SIZES, **schedule, **keys}
    data_id = keys.pop("data_id", None) or check_data(data)[1]
    config = dataclasses.asdict(TrainConfig(variant=variant, seed=seed, **keys))
    path = root / f"{variant}-s{seed}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | {"data_id": data_id, "name": "toy", "n_params": 1}))
    records = [record("train", B, loss=5.0, lr=1e-3, grad_norm=1.0, tokens_per_s=10.0)]
    records += [record("eval", tokens, val_nll=nll) for tokens, nll in zip(MILESTONES, nlls)]
    records += [] if test is None else [record("test", 8 * B, test_nll=test)]
    (path / "metrics.jsonl").write_text("".join([*records, *lines]))
    if checkpoint is not None:
        state = {"model": checkpoint.state_dict(), "step": len(nlls), "config": config, "data_id": data_id}
        save_checkpoint(path / "ckpt.pt", state)
    return path


def edit_config(path, remove=(), **keys):
    """Change config.json in the run folder `path`."""
    file = path / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in remove}
    file.write_text(json.dumps(config | keys))
