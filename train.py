"""Train one run: one variant, one seed, on one device or under torchrun.

    python train.py configs/demo.toml --variant=block --seed=2
    torchrun --standalone --nproc_per_node=8 train.py configs/s.toml --variant=rd

Stopped or killed, a run goes on by the same command.
"""
# ruff: noqa: E402 - the command line is read before torch is imported: --help and a mistyped key answer at once

import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from lib.config import parse_config
from lib.devices import ask_for_determinism, pick_compile, pick_device, pick_dtype
from lib.errors import RankError, UserError, log, or_exit, warn
from lib.files import lock_folder, make_folder
from lib.run_folder import Metrics, mend_config, resume_run, save_run, write_config
from lib.shards import Windows, batch_windows, check_data, find_shards

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop takes it over, Ctrl-C ends the process
    CONFIG, NAME = or_exit(parse_config, sys.argv[1:], __doc__)

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kernels
from model import GPT, ModelConfig

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

    Evaluated at the update's end: step 0 has a rate above zero, the last step exactly the final rate.
    """
    tokens = min((step + 1) * config.batch_tokens, config.max_tokens)
    if tokens < config.warmup_tokens:
        return config.lr * tokens / config.warmup_tokens
    progress = (tokens - config.warmup_tokens) / max(1, config.max_tokens - config.warmup_tokens)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


# ---- setup -----------------------------------------------------------------------------------------------------------


def resolve(config, device, manifest):
    """Fill in the keys that machine and manifest decide. Raises UserError where keys do not fit together."""
    if manifest is None:
        tokenizer = config.tokenizer or "gpt2"
        vocab_size = config.vocab_size or {"gpt2": 50257, "bytes": 257}[tokenizer]
        warn(f"{config.data_dir} has no manifest.json: taking its tokens for {tokenizer}'s, vocabulary {vocab_size}")
    else:
        tokenizer, vocab_size = manifest["tokenizer"], manifest["vocab_size"]
    for name, known in (("tokenizer", tokenizer), ("vocab_size", vocab_size)):
        if getattr(config, name) not in ("", 0, known):
            what = f"{getattr(config, name)} but {config.data_dir}/manifest.json says {known}"
            raise UserError(f"config key {name}: {what}; drop --{name}, or name other data with --data_dir")
    if config.batch_tokens % (pass_tokens := WORLD * config.micro_batch * config.context):
        what = f"{WORLD} ranks x micro_batch {config.micro_batch} x context {config.context} = {pass_tokens}"
        way_out = f"of {what}; change --micro_batch or --batch_tokens"
        raise UserError(f"config key batch_tokens: {config.batch_tokens} is not a multiple {way_out}")
    if config.warmup_tokens >= config.max_tokens:
        covers = f"{config.warmup_tokens} covers all of max_tokens = {config.max_tokens}"
        warn(f"config key warmup_tokens: {covers}: the rate will not fall again")
    milestones = config.milestones or tuple(max(1, config.max_tokens // part) for part in (8, 4, 2, 1))
    dtype = pick_dtype(config, device)
    return replace(config, milestones=milestones, tokenizer=tokenizer, vocab_size=vocab_size, dtype=dtype)


def build_model(config):
    """The freshly initialised model: a function of the seed alone, drawn on the CPU whatever the device."""
    torch.manual_seed(config.seed)
    try:
        model = GPT(ModelConfig(**{field.name: getattr(config, field.name) for field in fields(ModelConfig)}))
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


# ---- data, gradients, evaluation -------------------------------------------------------------------------------------


def fetch(windows, ids, device, where):
    """Windows `ids` -> inputs, targets (B, context) on the device. Raises RankError naming `where` for a bad window."""
    try:
        rows = torch.from_numpy(windows.read(ids))
    except UserError as error:
        raise RankError(f"rank {RANK}, {where}: {error}") from error
    cuda = device.type == "cuda"
    rows = (rows.pin_memory() if cuda else rows).to(device, non_blocking=cuda)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def all_reduce(values, device):
    """Sum a list of floats over the ranks."""
    if WORLD == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def backward(net, windows, ids, config, device, autocast, where):
    """Accumulate the gradient of the mean NLL over windows `ids`, micro_batch windows a pass -> that mean, a tensor ().

    Under DDP the ranks' gradients are averaged once, in the last pass.
    """
    total, passes = 0.0, len(ids) // config.micro_batch
    for i in range(passes):
        idx, targets = fetch(windows, ids[i * config.micro_batch : (i + 1) * config.micro_batch], device, where)
        with net.no_sync() if WORLD > 1 and i < passes - 1 else nullcontext():
            with autocast():
                _, loss = net(idx, targets)
            (loss / passes).backward()
        total += loss.detach() / passes
    return total


@torch.no_grad()
def evaluate(model, windows, config, device, autocast):
    """Mean NLL, in nats a token, over the split's fixed windows: the same for every variant, world, micro-batch size.

    Every pass has micro_batch rows, so that there is one shape to compile. A last pass that is short is filled with
    rows whose targets do not count. Ranks take passes in turn. Nothing is random.
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


# ---- the run ---------------------------------------------------------------------------------------------------------


def main(config, name):
    """Train the run of a TrainConfig, read from the config file `name` -> exit status."""
    # ---- setup: everything that can be wrong is found before the first step
    out_dir = Path(config.out_dir or f"out/{name}/{config.variant}-s{config.seed}")
    ask_for_determinism(config.deterministic)
    device = pick_device(config.device, "config key device", LOCAL_RANK)
    manifest, data_id = check_data(config.data_dir, config.verify)
    config = resolve(config, device, manifest)
    compiled = pick_compile(config, device)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")

    # ---- data
    splits = [split for split, paths in find_shards(config.data_dir).items() if paths]
    windows = {split: Windows(config.data_dir, split, config.context, config.vocab_size) for split in splits}
    n_train, batch = len(windows["train"]), config.batch_tokens // config.context  # batch: windows an update
    share = batch // WORLD  # a rank's

    # ---- model
    model = build_model(config).to(device)
    optimizer = build_optimizer(model, config)
    reads = kernels.use(config.reads, model, device, getattr(torch, config.dtype))
    n_params = sum(parameter.numel() for parameter in model.parameters())

    # ---- the run's folder, and where the run goes on
    if RANK == 0:
        make_folder(out_dir, "out_dir")
        lock = lock_folder(out_dir, config.wait)  # noqa: F841 - held until the process ends
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        dist.barrier()  # rank 0 has the lock: nobody else is writing
    first = step = resume_run(out_dir, model, optimizer, config, data_id, device)
    if all_reduce([step], device) != [step * WORLD]:
        raise UserError(
            f"out_dir: ranks found different checkpoints in {out_dir}; it must lie where all of them see it"
        )
    last = updates(config.stop_tokens or config.max_tokens, config)
    facts = dict(name=name, data_id=data_id, n_params=n_params, world=WORLD)

    def say(text):
        log(f"{out_dir.name}: {text}")

    if step >= last:
        say(f"finished: {step} updates, {step * config.batch_tokens:,} tokens; nothing to do")
        if RANK == 0:
            mend_config(out_dir, config, **facts)
        return 0
    if RANK == 0:
        write_config(out_dir, config, **facts)
        metrics = Metrics(out_dir / "metrics.jsonl", step)

    def record(kind, step, **values):
        if RANK == 0:
            metrics.write(kind=kind, step=step, tokens=step * config.batch_tokens, **values)

    def stop_unless_finite(step, why, *values):
        """Raise UserError naming update `step` and its windows. All ranks have the same values and stop together."""
        if not all(map(math.isfinite, values)):
            record("diverged", step, why=why)
            ids = batch_windows(config.seed, step - 1, batch, n_train).tolist()
            what = f"update {step} is not finite ({why}); its window ids {ids}"
            raise UserError(f"{out_dir}: {what}; the last checkpoint is intact: lower --lr, or look at these windows")

    if compiled:
        model.compile(fullgraph=True, dynamic=False)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True) if WORLD > 1 else model
    told = []  # the signals that came
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: told.append(received))

    how = f"{config.dtype}, {reads} reads, {'compiled' if compiled else 'not compiled'}"
    passes = f"{WORLD} rank(s) x {share // config.micro_batch} passes x {config.micro_batch} x {config.context} tokens"
    say(f"{n_params:,} parameters, {device}, {how}, {passes}; updates {step} to {last}")
    seen = f"{n_train:,} to train on, read {last * batch / n_train:.2g} times"
    n_eval, n_val = len(windows["val"].spread(config.eval_tokens)), len(windows["val"])
    say(f"windows of {config.context} tokens: {seen}; evaluation on {n_eval:,} of {n_val:,}")

    # ---- the loop
    milestones = {updates(tokens, config) for tokens in config.milestones} | {last}
    seconds = dict(updates=0.0, evaluation=0.0, checkpoints=0.0)
    saved = mark = time.perf_counter()
    logged, logged_at = step, 0.0  # step and seconds of updates at the last log line

    def lap(what):
        """Count the time since the last lap as time of `what`."""
        nonlocal mark
        now = time.perf_counter()
        seconds[what] += now - mark
        mark = now

    while step < last:
        ids = batch_windows(config.seed, step, batch, n_train)[RANK * share : (RANK + 1) * share]
        loss = backward(net, windows["train"], ids, config, device, autocast, f"update {step + 1}")
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf))
        for group in optimizer.param_groups:
            group["lr"] = lr = learning_rate(step, config)
        # one wait for the device an update: the mean loss over the global batch, and whether any rank was told to stop
        loss, stop = all_reduce([float(loss) / WORLD, float(len(told))], device)
        stop_unless_finite(step + 1, f"loss {loss}, gradient norm {grad_norm}", loss, grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        lap("updates")

        if step % config.log_interval == 0 or step in (1, last):  # by the step alone, so that a stop changes no record
            rate = (step - logged) * config.batch_tokens / (seconds["updates"] - logged_at)
            logged, logged_at = step, seconds["updates"]
            left = timedelta(seconds=round(sum(seconds.values()) / (step - first) * (last - step)))
            record("train", step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=rate)
            pace = f"{rate:,.0f} tokens/s  {left} left"
            say(f"step {step}/{last}  loss {loss:.4f}  lr {lr:.2e}  grad {grad_norm:.2f}  {pace}")
        if step in milestones or (config.eval_interval and step % config.eval_interval == 0):
            val_nll = evaluate(model, windows["val"], config, device, autocast)
            stop_unless_finite(step, f"validation {val_nll}", val_nll)
            record("eval", step, val_nll=val_nll)
            say(f"step {step}/{last}  validation {val_nll:.4f} nats a token")
        if step == last and "test" in windows:
            test_nll = evaluate(model, windows["test"], config, device, autocast)
            record("test", step, test_nll=test_nll)
            say(f"step {step}/{last}  test {test_nll:.4f} nats a token")
        lap("evaluation")

        due = config.checkpoint_interval and step % config.checkpoint_interval == 0
        if due or mark - saved > 60 * config.checkpoint_minutes or step == last or stop:
            if RANK == 0:  # its clock counts: it alone writes. Last of all: a checkpoint's step has all its records
                metrics.sync()
                save_run(out_dir, model, optimizer, step, config, data_id)
            lap("checkpoints")
            saved = mark
        if stop and step < last:
            say(f"told to stop; saved at step {step}: run the same command to go on")
            return INTERRUPTED
    total = sum(seconds.values())
    shares = ", ".join(f"{what} {seconds[what] / total:.1%}" for what in ("evaluation", "checkpoints"))
    say(f"finished: updates {first} to {last} in {timedelta(seconds=round(total))}; {shares}")
    return 0


if __name__ == "__main__":
    status = or_exit(main, CONFIG, NAME)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
