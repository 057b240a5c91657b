"""A run's folder: config.json, metrics.jsonl, ckpt.pt, and the rules by which a run goes on in it.

config.json          the run's config as resolved, its data, its machine
metrics.jsonl        one record per line, each step once; metrics.lost.jsonl: records of runs whose checkpoint is lost
ckpt.pt              the newest checkpoint; ckpt.prev.pt: the one before; ckpt.new.pt: one whose writing was cut short
.lock                held by the process that trains here
"""

import contextlib
import dataclasses
import json
import os
import sys
import zipfile
from pathlib import Path

from lib.config import identity
from lib.devices import cpu_model
from lib.errors import UserError, log, one_line, warn
from lib.files import atomic_write, fsync_folder, read_json

# ---- config.json -----------------------------------------------------------------------------------------------------


def write_config(out_dir, config, **facts):
    """Write config.json: the keys of the run, `facts` about it, and the machine, whose rounding a loss depends on."""
    import torch

    machine = {"python": sys.version.split()[0], "torch": torch.__version__}
    machine |= {"cpu": cpu_model(), "threads": torch.get_num_threads()}
    with atomic_write(Path(out_dir) / "config.json", "w") as file:
        json.dump({**dataclasses.asdict(config), **facts, **machine}, file, indent=1)


def mend_config(out_dir, config, **facts):
    """Write config.json again where it is missing or damaged: diagnose.py reads it."""
    try:
        read_json(Path(out_dir) / "config.json")
    except UserError:
        write_config(out_dir, config, **facts)
        log(f"{out_dir}: config.json was missing or damaged: written again from the checkpoint's run")


def refuse_other(theirs, their_data_id, config, data_id, out_dir):
    """Raise UserError unless the run whose config (a dict) and data are in `out_dir` is this one.

    Only the keys of today's identity are compared: a key that has gone, such as `fused`, says nothing about the run.
    """
    theirs = {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()}  # config.json has no tuples
    ours = identity(dataclasses.asdict(config))
    differing = [f"{k} = {theirs.get(k)!r}, now {v!r}" for k, v in ours.items() if theirs.get(k) != v]
    if their_data_id != data_id:
        differing.append(f"the data ({theirs.get('data_dir')}, now {config.data_dir})")
    if differing:
        what = "; ".join(differing)
        raise UserError(f"{out_dir} holds a run with other settings: {what}; restore them or name another --out_dir")


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def read_metrics(path):
    """The records of a metrics.jsonl; a line that a kill cut short is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step"), int)]


class Metrics:
    """metrics.jsonl, open for writing: one JSON record per line, flushed at once.

    Opening drops the records after `step`, from which the run goes on. What an evaluated run without a checkpoint left
    goes to metrics.lost.jsonl. Raises UserError where a record cannot be written.
    """

    def __init__(self, path, step):
        self.path = path
        if step == 0:
            self.keep_lost()
        with atomic_write(path, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step)
        self.file = open(path, "a", encoding="utf-8", buffering=1)

    def keep_lost(self):
        if any(record.get("kind") in ("eval", "test") for record in read_metrics(self.path)):
            lost = self.path.with_name("metrics.lost.jsonl")
            with open(lost, "ab") as file:  # of every such run, one after another
                file.write(self.path.read_bytes())
            folder = self.path.parent
            warn(f"{folder} has no checkpoint: beginning anew; the records of the run before are in {lost.name}")

    def write(self, **record):
        with self.naming_errors():
            self.file.write(json.dumps(record) + "\n")

    def sync(self):
        """Before a checkpoint: a power cut then takes no record of a step that the checkpoint holds."""
        with self.naming_errors():
            os.fsync(self.file.fileno())

    @contextlib.contextmanager
    def naming_errors(self):
        try:
            yield
        except OSError as error:
            why = f"{error.strerror}; the checkpoint is intact: free space, run again"
            raise UserError(f"cannot write {self.path}: {why}") from error


# ---- ckpt.pt ---------------------------------------------------------------------------------------------------------

CHECKPOINT_FORMAT = 1


def save_run(out_dir, model, optimizer, step, config, data_id):
    """Write the checkpoint of a run that has done `step` updates."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    save_checkpoint(Path(out_dir) / "ckpt.pt", {**state, "config": dataclasses.asdict(config), "data_id": data_id})


def resume_run(out_dir, model, optimizer, config, data_id, device):
    """Load the newest checkpoint into model and optimizer; returns the number of updates done, 0 without one.

    Raises UserError where the folder holds another run, with a checkpoint or without.
    """
    state = load_checkpoint(out_dir, device)
    if state:
        return restore(state, model, optimizer, config, data_id, out_dir)
    if (Path(out_dir) / "config.json").exists():  # stopped before its first checkpoint, or that is lost
        theirs = read_json(Path(out_dir) / "config.json")
        refuse_other(theirs, theirs.get("data_id"), config, data_id, out_dir)
    return 0


def restore(state, model, optimizer, config, data_id, out_dir):
    """Load `state`, a checkpoint, into model and optimizer; returns its step. Raises UserError for another run's."""
    path, other = Path(out_dir) / "ckpt.pt", "train.py did not write it; name another --out_dir"
    if missing := {"model", "optimizer", "step", "config", "data_id"} - state.keys():
        raise UserError(f"{path} has no {', '.join(sorted(missing))}: {other}")
    step, theirs = state["step"], state["config"]
    if not isinstance(step, int) or step < 0 or not isinstance(theirs, dict):
        raise UserError(f"{path} holds step {step!r} and config of type {type(theirs).__name__}: {other}")
    refuse_other(theirs, state["data_id"], config, data_id, out_dir)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if step and not optimizer.state:
            raise ValueError("the optimizer's moments are missing")
        for parameter, moments in optimizer.state.items():
            if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("the optimizer's moments have other shapes than the weights")
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not fit the model: {one_line(error)}; name another --out_dir") from error
    return step


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
    """The newest whole checkpoint of a run folder (a dict), or None where there has been none.

    A damaged one is named in a warning, and the one before is used. Raises UserError where all are damaged. Only
    tensors and plain values are unpickled.
    """
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
        raise UserError(
            f"{run_dir}: has no checkpoint that can be read ({' and '.join(damaged)} damaged); bring one back from a "
            "copy, or delete them to train from the start"
        )
    return None


# ---- for the tools ---------------------------------------------------------------------------------------------------


def load_run(run_dir, device="cpu"):
    """(model, checkpoint) of a run folder's newest whole checkpoint. Raises UserError where there is none that fits."""
    from model import GPT, ModelConfig

    state = load_checkpoint(run_dir, device)
    if state is None:
        raise UserError(f"{run_dir}: has no checkpoint (ckpt.pt); name a run's folder, such as out/demo/rd-s1")
    try:
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        model = GPT(ModelConfig(**{name: state["config"][name] for name in names}))
        model.load_state_dict(state["model"])
        state["config"]["tokenizer"], state["step"]  # noqa: B018 - the tools read them
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{run_dir}/ckpt.pt does not fit model.py: {one_line(error)}; name another run") from error
    return model.to(device), state
