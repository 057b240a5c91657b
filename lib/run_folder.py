"""What a run leaves in its folder: config.json, metrics.jsonl, ckpt.pt."""

import contextlib
import dataclasses
import json
import os
import zipfile
from pathlib import Path

from lib.errors import UserError, one_line, warn
from lib.files import atomic_write, fsync_folder


CHECKPOINT_FORMAT = 1


def read_metrics(path):
    """The records of a metrics.jsonl; a line that a kill cut short is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


def save_checkpoint(path, state):
    """Write a checkpoint so that a whole one stands under `path` or `ckpt.prev.pt` at every moment."""
    import torch

    path = Path(path)
    fresh = path.with_name("ckpt.new.pt")
    try:
        with atomic_write(fresh) as file:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, file)
    except RuntimeError as error:  # torch's zip writer fails once more after the write that failed, and hides why
        cause = error.__context__.strerror if isinstance(error.__context__, OSError) else str(error).splitlines()[0]
        raise UserError(f"cannot write {path}: {cause}; earlier checkpoints are intact") from error
    if path.exists():
        os.replace(path, path.with_name("ckpt.prev.pt"))
    os.replace(fresh, path)
    fsync_folder(path.parent)


def load_checkpoint(run_dir, device="cpu"):
    """The newest whole checkpoint of a run folder (a dict), or None where there has been none. A damaged one is named in a
    warning and the one before is used; UserError where all are damaged. Only tensors and plain values are unpickled."""
    import torch

    damaged = {}  # {name: why}
    # ckpt.new.pt: a kill between the renames leaves the last whole one there, where the one before is damaged
    for path in (Path(run_dir) / name for name in ("ckpt.pt", "ckpt.prev.pt", "ckpt.new.pt")):
        if not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not check the archive's checksums
                if archive.testzip() is not None:
                    raise ValueError("checksum mismatch")
            state = torch.load(path, map_location=device, weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("not a checkpoint")
        except Exception as error:  # a damaged file fails in many ways
            damaged[path.name] = (str(error) or type(error).__name__).splitlines()[0]
            warn(f"{path} is damaged ({damaged[path.name]}); looking for the one before")
            continue
        if state.get("format") != CHECKPOINT_FORMAT:
            raise UserError(f"{path}: checkpoint format {state.get('format')}, this code reads {CHECKPOINT_FORMAT}")
        return state
    if damaged:
        raise UserError(f"{run_dir}: has no checkpoint that can be read ({' and '.join(damaged)} damaged); bring one back from a copy, "
                        "or delete them to train from the start")  # fmt: skip
    return None


def load_run(run_dir, device="cpu"):
    """(model, checkpoint) of a run folder's newest whole checkpoint. Raises UserError where there is none, or none that fits."""
    from model import GPT, ModelConfig

    state = load_checkpoint(run_dir, device)
    if state is None:
        raise UserError(f"{run_dir}: has no checkpoint (ckpt.pt); name a run's folder, such as out/demo/rd-s1")
    try:
        model = GPT(ModelConfig(**{field.name: state["config"][field.name] for field in dataclasses.fields(ModelConfig)}))
        model.load_state_dict(state["model"])
        state["config"]["tokenizer"], state["step"]
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{run_dir}/ckpt.pt does not fit model.py: {one_line(error)}; name another run") from error
    return model.to(device), state
