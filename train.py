"""Train one run: one variant, one seed, on one device or under torchrun. Stopped or killed, the same command goes on.

    python train.py configs/demo.toml --variant=block --seed=2
    torchrun --standalone --nproc_per_node=8 train.py configs/s.toml --variant=rd
"""

import ctypes
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from lib.config import identity, parse_config
from lib.errors import RankError, UserError, log, one_line, or_exit, warn
from lib.files import atomic_write, lock_folder, make_folder, read_json
from lib import devices
from lib.run_folder import load_checkpoint, read_metrics, save_checkpoint
from lib.shards import Windows, batch_windows, check_data, find_shards

if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop takes it over, Ctrl-C just ends this
    CONFIG, NAME = or_exit(parse_config, sys.argv[1:], __doc__)

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fused
from model import GPT, VARIANTS, Layer, ModelConfig, read_finished

INTERRUPTED = 75  # exit status after SIGTERM or SIGINT (EX_TEMPFAIL): run the same command again to go on
RANK = int(os.environ.get("RANK", 0))  # torchrun sets these three
WORLD = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


# ---- the schedule ----------------------------------------------------------------------------------------------------


def updates(tokens, config):
    """Number of updates that reach `tokens`: "at step n" means after exactly n updates."""
    return math.ceil(tokens / config.batch_tokens)


def learning_rate(step, config):
    """Rate of the update that follows `step` updates: linear warm-up, then a cosine from lr to min_lr_ratio * lr.

    It is taken at the tokens that the update completes, so the first one moves and the last one has the final rate.
    """
    tokens = min((step + 1) * config.batch_tokens, config.max_tokens)
    if tokens < config.warmup_tokens:
        return config.lr * tokens / config.warmup_tokens
    progress = (tokens - config.warmup_tokens) / max(1, config.max_tokens - config.warmup_tokens)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


# ---- setup -----------------------------------------------------------------------------------------------------------


def pick_device(config):
    """The torch.device of this rank; raises UserError for one that is not here."""
    return devices.pick_device(config.device, "config key device", LOCAL_RANK)


def pick_dtype(config, device):
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("config key dtype: this GPU has no bfloat16; use --dtype=float32")
    if dtype == "float64" and device.type == "mps":
        raise UserError("config key dtype: mps has no float64; use --dtype=float32")
    return dtype


def pick_compile(config, device):
    if config.compile == "true" and device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("config key compile: on a CPU torch.compile needs a C++ compiler, and g++ is not here; use --compile=false")
    return config.compile == "true" or (config.compile == "auto" and device.type == "cuda")


def pick_fused(config, device):
    """Whether phase 1 of the reads is fused.c's kernel, which is compiled here; where `auto` would like it and cannot, it says so."""
    if config.fused == "false" or not VARIANTS[config.variant].routed:
        return False
    dtype = getattr(torch, config.dtype)
    try:
        if device.type != "cpu" or dtype not in fused.REALS:
            if config.fused == "auto":
                return False
            raise UserError(f"fused.c is for float32 and float64 on a CPU, not for {config.dtype} on {device.type}")
        fused.prepare(config, dtype)
    except UserError as error:
        if config.fused == "true":
            raise UserError(f"config key fused: {error}; use --fused=false") from error
        warn(f"{error}: the depth reads take PyTorch's operations, several passes over memory for one")
        return False
    return True


def keep_freed_memory(device):
    """On a CPU, have glibc's malloc keep what a step frees for the next one, which would else pay for every page anew.

    PyTorch has a cache of its own on a GPU, and on a CPU none. Tensors of 32 MiB and more, where no freed place holds them, still go back.
    """
    if device.type != "cpu":
        return
    trim_threshold, mmap_threshold = -1, -3  # mallopt's names for them, from malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(trim_threshold, -1)  # never
    mallopt(mmap_threshold, 32 * 2**20)


def compile_parts(model, device):
    """Compile the two sublayers and the loss, once for all layers: the time it takes does not grow with L.

    Phase 1 of the reads has another graph for every number of sources, N + 1 of them. Off the CPU a fused one is worth that. On a CPU
    there is fused.c, in float32 or float64; without it phase 1 is not compiled.
    """
    once = partial(torch.compile, fullgraph=True, dynamic=False)
    attend, transform = once(Layer.attend), once(Layer.transform)
    for layer in model.layers:  # on the instances: other models in the process stay as they are, and parameter names clean
        layer.attend, layer.transform = partial(attend, layer), partial(transform, layer)
    model.loss = once(model.loss)
    if device.type != "cpu":
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * model.config.n_blocks + 8)
        model.read_finished = once(read_finished)


def resolve(config, device, manifest):
    """Fill in what the machine and the manifest decide, and check what must fit together."""
    if manifest is None:
        tokenizer = config.tokenizer or "gpt2"
        vocab_size = config.vocab_size or {"gpt2": 50257, "bytes": 257}[tokenizer]
        if RANK == 0:
            warn(f"{config.data_dir} has no manifest.json: taking its tokens for {tokenizer}'s, vocabulary {vocab_size}")
    else:
        tokenizer, vocab_size = manifest["tokenizer"], manifest["vocab_size"]
    for name, known in (("tokenizer", tokenizer), ("vocab_size", vocab_size)):
        if getattr(config, name) not in ("", 0, known):
            raise UserError(f"config key {name}: {getattr(config, name)} but {config.data_dir}/manifest.json says {known}; "
                            f"drop --{name}, or name other data with --data_dir")  # fmt: skip
    if config.batch_tokens % (WORLD * config.micro_batch * config.context):
        raise UserError(f"config key batch_tokens: {config.batch_tokens} is not a multiple of {WORLD} ranks x micro_batch "
                        f"{config.micro_batch} x context {config.context} = {WORLD * config.micro_batch * config.context}; "
                        "change --micro_batch or --batch_tokens")  # fmt: skip
    if config.warmup_tokens >= config.max_tokens:
        warn(f"config key warmup_tokens: {config.warmup_tokens} covers all of max_tokens = {config.max_tokens}: the rate will not fall again")
    milestones = config.milestones or tuple(max(1, config.max_tokens // part) for part in (8, 4, 2, 1))
    return replace(config, milestones=milestones, tokenizer=tokenizer, vocab_size=vocab_size, dtype=pick_dtype(config, device))


def build_model(config):
    """The freshly initialised model: a function of the seed alone, drawn on the CPU whatever the device."""
    torch.manual_seed(config.seed)
    try:
        model = GPT(ModelConfig(**{f.name: getattr(config, f.name) for f in fields(ModelConfig)}))
    except (ValueError, RuntimeError) as error:  # RuntimeError: not enough memory
        raise UserError(f"config: {str(error).splitlines()[0]}") from error
    return model.double() if config.dtype == "float64" else model


def build_optimizer(model, config):
    """AdamW with weight decay on matrices only: never on gains or route queries. A frozen query is left out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.adam_eps, fused=True)


# ---- data ------------------------------------------------------------------------------------------------------------


def fetch(windows, ids, device, where):
    """Windows `ids` -> inputs and targets (B, context) on the device. A rank may meet a bad one alone: it says `where`."""
    try:
        rows = torch.from_numpy(windows.read(ids))
    except UserError as error:
        raise RankError(f"rank {RANK}, {where}: {error}") from error
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    else:
        rows = rows.to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def all_reduce(values, device):
    """Sum a list of floats over the ranks."""
    if WORLD == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


@torch.no_grad()
def evaluate(model, windows, config, device, autocast):
    """Mean NLL, in nats a token, over the split's fixed windows: the same for every variant, world and micro-batch size.

    Every pass has micro_batch rows; a last one that is short is filled with rows whose targets do not count, so that there
    is one shape to compile. Ranks take passes in turn. Nothing is random.
    """
    ids = windows.spread(config.eval_tokens)
    losses, counts = [torch.zeros((), device=device)], [0]
    for start in range(RANK * config.micro_batch, len(ids), WORLD * config.micro_batch):
        part = ids[start : start + config.micro_batch]
        idx, targets = fetch(windows, np.resize(part, config.micro_batch), device, "evaluation")
        targets[len(part) :] = -100
        with autocast():
            losses.append(model(idx, targets)[1])
        counts.append(len(part))
    total = sum(loss * count for loss, count in zip(torch.stack(losses).tolist(), counts))
    total, count = all_reduce([total, sum(counts)], device)
    return total / count


# ---- run folder ------------------------------------------------------------------------------------------------------


class Metrics:
    """metrics.jsonl of rank 0: one JSON record a line, flushed at once. Records past `step`, where the run goes on, go."""

    def __init__(self, path, step):
        self.path, self.file = path, None
        if RANK == 0:
            with atomic_write(path, "w") as file:
                file.writelines(json.dumps(r) + "\n" for r in read_metrics(path) if r["step"] <= step)
            self.file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, **record):
        if self.file:
            self.attempt(self.file.write, json.dumps(record) + "\n")

    def sync(self):
        """Before a checkpoint, so that a power cut takes no record of a step that it holds."""
        self.attempt(os.fsync, self.file.fileno())

    def attempt(self, function, argument):
        try:
            function(argument)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; the checkpoint is intact: free space, run again") from error


def refuse_other(theirs, their_data_id, config, data_id, out_dir):
    """Raise UserError unless the run whose config (a dict) and data are in `out_dir` is this one."""
    theirs = {k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()}  # config.json has no tuples
    ours = identity(asdict(config))
    differing = [f"{k} = {theirs.get(k)!r}, now {v!r}" for k, v in ours.items() if theirs.get(k) != v]
    if their_data_id != data_id:
        differing.append(f"the data ({theirs.get('data_dir')}, now {config.data_dir})")
    if differing:
        raise UserError(f"{out_dir} holds a run with other settings: {'; '.join(differing)}; restore them or name another --out_dir")


def restore(state, model, optimizer, config, data_id, out_dir):
    """Load a checkpoint into model and optimizer; returns the number of updates done. Refuses one of another run."""
    if missing := {"model", "optimizer", "step", "config", "data_id"} - state.keys():
        raise UserError(f"{out_dir}/ckpt.pt has no {', '.join(sorted(missing))}: train.py did not write it; name another --out_dir")
    step = state["step"]
    if not isinstance(step, int) or step < 0 or not isinstance(state["config"], dict):
        raise UserError(f"{out_dir}/ckpt.pt holds step {step!r} and config of type {type(state['config']).__name__}: train.py did not write it; name another --out_dir")
    refuse_other(state["config"], state["data_id"], config, data_id, out_dir)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if step and not optimizer.state:
            raise ValueError("the optimizer's moments are missing")
        for parameter, moments in optimizer.state.items():
            if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("the optimizer's moments have other shapes than the weights")
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{out_dir}/ckpt.pt does not fit the model: {one_line(error)}; name another --out_dir") from error
    return step


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# ---- the run ---------------------------------------------------------------------------------------------------------


def main(config, name):
    out_dir = Path(config.out_dir or f"out/{name}/{config.variant}-s{config.seed}")

    def say(text):
        log(f"{out_dir.name}: {text}")

    # ---- setup: everything that can be wrong is found before the first step
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(config.deterministic)
    device = pick_device(config)
    keep_freed_memory(device)
    manifest, data_id = check_data(config.data_dir, config.verify)
    config = resolve(config, device, manifest)
    compiled = pick_compile(config, device)
    shards = find_shards(config.data_dir)
    windows = {split: Windows(config.data_dir, split, config.context, config.vocab_size) for split in shards if shards[split]}
    model = build_model(config).to(device)
    optimizer = build_optimizer(model, config)
    kernel = pick_fused(config, device)

    if RANK == 0:
        make_folder(out_dir, "out_dir")
        lock = lock_folder(out_dir, config.wait)  # held until the process ends
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        dist.barrier()  # rank 0 has the lock: nobody else is writing
    state = load_checkpoint(out_dir, device)
    step = restore(state, model, optimizer, config, data_id, out_dir) if state else 0
    if not state and (out_dir / "config.json").exists():  # stopped before its first checkpoint, or that is lost
        theirs = read_json(out_dir / "config.json")
        refuse_other(theirs, theirs.get("data_id"), config, data_id, out_dir)
        if RANK == 0 and any(record.get("kind") in ("eval", "test") for record in read_metrics(out_dir / "metrics.jsonl")):
            with open(out_dir / "metrics.lost.jsonl", "ab") as file:  # of every such run, one after another
                file.write((out_dir / "metrics.jsonl").read_bytes())
            warn(f"{out_dir} has no checkpoint: beginning anew; the records of the run before are in metrics.lost.jsonl")
    del state
    if all_reduce([step], device) != [step * WORLD]:
        raise UserError(f"out_dir: the ranks found different checkpoints in {out_dir}; it must lie where all of them see it")
    last = updates(config.stop_tokens or config.max_tokens, config)
    n_params = sum(parameter.numel() for parameter in model.parameters())

    def write_config():
        with atomic_write(out_dir / "config.json", "w") as file:
            versions = {"python": sys.version.split()[0], "torch": torch.__version__}
            json.dump({**asdict(config), "name": name, "data_id": data_id, "n_params": n_params, "world": WORLD, **versions}, file, indent=1)

    if step >= last:
        say(f"finished: {step} updates, {step * config.batch_tokens:,} tokens; nothing to do")
        try:
            read_json(out_dir / "config.json")
        except UserError:
            if RANK == 0:
                write_config()  # diagnose.py wants it
                say("config.json was missing or damaged: written again from the checkpoint's run")
        return 0

    if kernel:
        model.read_finished = fused.read_finished
    if compiled:
        compile_parts(model, device)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True) if WORLD > 1 else model

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")

    if RANK == 0:
        write_config()
    metrics = Metrics(out_dir / "metrics.jsonl", step)

    def save():
        if RANK == 0:
            metrics.sync()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save_checkpoint(out_dir / "ckpt.pt", {**state, "config": asdict(config), "data_id": data_id})

    def stop_unless_finite(step, why, *values):
        """All ranks have the same values, and stop together."""
        if not all(map(math.isfinite, values)):
            metrics.write(kind="diverged", step=step, tokens=step * config.batch_tokens, why=why)
            ids = batch_windows(config.seed, step - 1, batch, len(windows["train"])).tolist()
            raise UserError(f"{out_dir}: update {step} is not finite ({why}); its window ids {ids}; the weights before it were kept as of "
                            "the last checkpoint: lower --lr, or look at these windows")  # fmt: skip

    stop_signals = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stop_signals.append(received))

    # ---- the loop
    batch = config.batch_tokens // config.context  # windows an update, over all ranks
    share = batch // WORLD
    passes = share // config.micro_batch
    milestones = {updates(tokens, config) for tokens in config.milestones} | {last}
    how = f"{', compiled' if compiled else ''}{', reads by fused.c' if kernel else ''}"
    say(f"{n_params:,} parameters, {device}, {config.dtype}{how}, {WORLD} rank(s) x {passes} passes x "
        f"{config.micro_batch} x {config.context} tokens; updates {step} to {last}")  # fmt: skip
    n_train, n_val = len(windows["train"]), len(windows["val"])
    say(f"windows of {config.context} tokens: {n_train:,} to train on, read {last * batch / n_train:.2g} times; "
        f"evaluation on {len(windows['val'].spread(config.eval_tokens)):,} of {n_val:,}")  # fmt: skip
    first, started, spent, since = step, time.perf_counter(), 0.0, step  # spent: seconds of updates since the last log line
    saved, aside = started, {"evaluation": 0.0, "checkpoints": 0.0}  # when the last checkpoint was; seconds that were no updates
    while step < last:
        began = time.perf_counter()
        ids = batch_windows(config.seed, step, batch, len(windows["train"]))[RANK * share : (RANK + 1) * share]
        total = 0.0
        for i in range(passes):
            part = ids[i * config.micro_batch : (i + 1) * config.micro_batch]
            idx, targets = fetch(windows["train"], part, device, f"update {step + 1}")
            with net.no_sync() if WORLD > 1 and i < passes - 1 else nullcontext():  # gradients meet once an update
                with autocast():
                    _, loss = net(idx, targets)
                (loss / passes).backward()
            total += loss.detach() / passes
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        # one wait for the device an update: the mean loss over the global batch, and whether any rank was told to stop
        loss, told = all_reduce([float(total) / WORLD, float(len(stop_signals))], device)
        stop_unless_finite(step + 1, f"loss {loss}, gradient norm {float(grad_norm)}", loss, grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens = step * config.batch_tokens
        spent += time.perf_counter() - began

        if step % config.log_interval == 0 or step in (1, last):  # by the step alone, so that a stop changes no record
            rate = (step - since) * config.batch_tokens / spent
            left = (time.perf_counter() - started) / (step - first) * (last - step)
            lr = optimizer.param_groups[0]["lr"]
            metrics.write(kind="train", step=step, tokens=tokens, loss=loss, lr=lr, grad_norm=float(grad_norm), tokens_per_s=rate)
            say(f"step {step}/{last}  loss {loss:.4f}  lr {lr:.2e}  grad {float(grad_norm):.2f}  {rate:,.0f} tokens/s  {clock(left)} left")
            spent, since = 0.0, step
        began = time.perf_counter()
        if step in milestones or (config.eval_interval and step % config.eval_interval == 0):
            val_nll = evaluate(model, windows["val"], config, device, autocast)
            stop_unless_finite(step, f"validation {val_nll}", val_nll)
            metrics.write(kind="eval", step=step, tokens=tokens, val_nll=val_nll)
            say(f"step {step}/{last}  validation {val_nll:.4f} nats a token")
        if step == last and "test" in windows:
            test_nll = evaluate(model, windows["test"], config, device, autocast)
            metrics.write(kind="test", step=step, tokens=tokens, test_nll=test_nll)
            say(f"step {step}/{last}  test {test_nll:.4f} nats a token")
        evaluated = time.perf_counter()
        due = evaluated - saved > 60 * config.checkpoint_minutes or (config.checkpoint_interval and step % config.checkpoint_interval == 0)
        if due or step == last or told:  # rank 0's clock counts: it alone writes
            save()  # last of all, so that a checkpoint's step has all its records
            saved = time.perf_counter()
            aside["checkpoints"] += saved - evaluated
        aside["evaluation"] += evaluated - began
        if told and step < last:
            say(f"told to stop; saved at step {step}: run the same command to go on")
            return INTERRUPTED
    total = time.perf_counter() - started
    say(f"finished: updates {first} to {last} in {clock(total)}; " + ", ".join(f"{what} {seconds / total:.1%}" for what, seconds in aside.items()))
    return 0


if __name__ == "__main__":
    status = or_exit(main, CONFIG, NAME)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
