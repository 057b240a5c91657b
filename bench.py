"""Variants side by side in one process: speed of whole training steps, memory, compile time, and the cost of one read.

    python bench.py configs/bench.toml --json=bench.json
    python bench.py configs/s.toml --variants=prenorm,block,rd --device=cuda --compile=true --batch_tokens=65536
    python bench.py configs/bench.toml --variants=prenorm,rd:plain,rd:cpu

A step is one update as train.py does it (forward, backward, clip, optimiser) over batch_tokens random tokens. A round
times one step of every variant, in a new order: what slows the machine falls on all alike. A ratio compares medians,
and its interval comes from resampling whole rounds, some 20 or more. Beside it stands the median of the rounds' own
ratios. Slowdowns longer than a round cancel in it, so prefer it on a shared machine.
On a CPU set malloc's thresholds as runs/pairs.sh does: freed pages stay mapped from step to step.
results/speed/scaling.py has the cost against L, N and D, and of a second rank.

    kept MiB        what autograd keeps for the backward of one pass: each storage once, without the parameters
    peak MiB        on a GPU CUDA's over a step, without what the other variants hold
                    on a CPU, eager, the resident memory of a process of its own
    compile s       the first step less a later one, with an empty cache
    cached s        the same in a second process, with the cache that the first one filled (--cached)
    MFU             share of a known GPU's dense bf16 peak, by 6 FLOPs per matrix parameter and 12 L D T per token
    limit by bytes  the ratio if reads cost only the time to copy the bytes that they must move, at the rate below it
    one read        N + 1 sources, forward and backward, in ms; stacked: two einsums per route over the stacked sources

Keys of train.py apply (--help); bench.py's own:
"""
# ruff: noqa: E402 - the command line is read before torch is imported: --help and a mistyped key answer at once

import argparse
import json
import math
import random
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from lib.config import parse_config
from lib.devices import pick_compile, pick_device
from lib.errors import Parser, UserError, or_exit
from lib.files import atomic_write, make_folder
from lib.shards import Windows, batch_windows, load_manifest

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parse(argv, about=__doc__):
    """argv -> (options, TrainConfig, name of the config). What is no option of bench.py goes to the config's parser."""
    parser = Parser(prog="bench.py", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add, names = parser.add_argument, "plain,prenorm,block,rd"
    add("--variants", default=names, help="of model.py, or plain, nanoGPT's trunk; rd:cpu is rd with --reads=cpu")
    add("--json", metavar="FILE", default="", help="where everything measured goes")
    add("--rounds", type=int, default=20, help="timed steps of each variant, 2 or more")
    add("--warmup", type=int, default=3, help="untimed steps of each after the first, which compiles; 1 or more")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where other programs share the cores")
    add("--cached", action="store_true", help="also time compiling with a filled cache, in a process of its own")
    add("--child", action="store_true", help=argparse.SUPPRESS)  # for bench.py itself: see child()
    options, rest = parser.parse_known_args(argv)
    if any(word.partition("=")[0] == "--variant" for word in rest):
        parser.error("bench.py compares several: --variants=prenorm,block,rd")
    if options.rounds < 2 or options.warmup < 1:
        parser.error(f"--rounds={options.rounds} must be 2 or more, --warmup={options.warmup} 1 or more")
    return options, *parse_config(rest, f"{about}\n{parser.format_help()}")


if __name__ == "__main__":
    PARSED = or_exit(parse, sys.argv[1:])

import numpy as np
import torch

import kernels
import train
from lib.measurement import (
    cuda_peak,
    in_child,
    kept_bytes,
    machine,
    median_time,
    of_rounds,
    ratio_interval,
    resident,
    versions,
    wait,
)
from lib.nanogpt import PlainGPT
from lib.read_cost import copy_rate, make_sources, plan_of, step_bytes, time_read
from lib.speed_table import table
from model import VARIANTS

BF16_PEAK = {  # dense bf16 TFLOP/s by NVIDIA's data sheets; the first name that the device's contains
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989,
    "A100": 312, "A800": 312, "L40S": 362, "L4": 121, "A10G": 70, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


# ---- one variant and its steps ---------------------------------------------------------------------------------------


class Entrant:
    """VARIANT or VARIANT:READS with its optimiser, one batch of random tokens, and the seconds of its steps."""

    def __init__(self, name, config, device, compiled):
        self.variant, _, reads = name.partition(":")
        self.name, self.device, self.compiled, self.seconds = name, device, compiled, []
        self.config = config = replace(config, variant=self.variant, reads=reads or config.reads)
        if self.variant == "plain":
            torch.manual_seed(config.seed)
            self.model, self.routed, self.read_bytes = PlainGPT(config), False, None
        else:
            self.model = train.build_model(config)
            self.routed, self.read_bytes = self.model.variant.routed, step_bytes(config, plan_of(self.model))
        self.model.to(device, torch.float64 if config.dtype == "float64" else None)
        dtype = getattr(torch, config.dtype)
        self.reads = kernels.use(config.reads, self.model, device, dtype) if self.routed else None
        self.optimizer = train.build_optimizer(self.model, config)
        passes = config.batch_tokens // (config.micro_batch * config.context)
        ids = torch.randint(config.vocab_size, (passes, config.micro_batch, config.context + 1))
        self.batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids.to(device)]
        if compiled:
            self.model.compile(fullgraph=True, dynamic=False)
        self.net = self.model  # results/speed/scaling.py puts DistributedDataParallel around it

    def loss(self, idx, targets):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return self.net(idx, targets)[1]

    def step(self, clock=time.perf_counter):
        """One update; returns its seconds by `clock`, after waiting for the device."""
        began = clock()
        for idx, targets in self.batches:
            (self.loss(idx, targets) / len(self.batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait(self.device)
        return clock() - began

    def first_steps(self, warmup):
        """Seconds of the first step less those of a later one: compiling, mostly."""
        first, *rest = [self.step() for _ in range(warmup + 1)]
        return first - min(rest)


def settle(config):
    """(config as train.py would run it, device, compiled). Without data the vocabulary is the config's, or GPT-2's."""
    device = pick_device(config.device, "config key device")
    stand_in = dict(tokenizer=config.tokenizer or "gpt2", vocab_size=config.vocab_size or 50257)
    config = train.resolve(config, device, load_manifest(config.data_dir) or stand_in)
    return config, device, pick_compile(config, device)


def enter(names, config, device, compiled):
    """One Entrant per name, in a process set up as train.py would and ready to compile several models."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if compiled:
        torch._dynamo.config.recompile_limit = 256  # all models share forward's code, and each has graphs of its own
        example = torch.ones(64, device=device, requires_grad=True)  # a process's first imports belong to no variant
        torch.compile(lambda x: (x * 2).exp().sum(), dynamic=False)(example).backward()
    return [Entrant(name, config, device, compiled) for name in names]


def empty_cache():
    """A context in which the compiler's cache, on disk and in memory, is an empty one of its own. Children share it."""
    from torch._inductor.utils import fresh_cache  # its import takes seconds

    return fresh_cache()


def time_rounds(entrants, rounds, clock):
    """`rounds` rounds of one step of each, in shuffled order, into their `seconds`."""
    shuffle, order = random.Random(0).shuffle, list(entrants)
    for _ in range(rounds):
        shuffle(order)
        for e in order:
            e.seconds.append(e.step(clock))


# ---- what is said of them --------------------------------------------------------------------------------------------


def flops_a_token(config, model):
    """6 FLOPs per matrix parameter and 12 L D T for attention, forward and backward: nanoGPT's count.

    Causality gives no discount. The tied embedding counts once, as the head. Positions and reads do not count.
    """
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "pos_emb" not in name)
    return 6 * matrices + 12 * config.n_layer * config.d_model * config.context


def peak_flops(config, device):
    """Dense bf16 peak of a known GPU, else None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and config.dtype == "bfloat16" else ""
    return next((1e12 * peak for known, peak in BF16_PEAK.items() if known in name), None)


def child(argv, name):
    """One entrant in a process of its own -> {"compile_s": seconds, "rss": peak resident bytes}."""
    return in_child(__file__, *argv, f"--variants={name}", "--child")


def describe(entrant, argv):
    """A row: what was measured of one entrant."""
    config, model, cuda = entrant.config, entrant.model, entrant.device.type == "cuda"
    alone = entrant.device.type == "cpu" and not entrant.compiled  # the compiler's own memory would drown the model's
    low, median, high = np.quantile(entrant.seconds, [0.25, 0.5, 0.75]).tolist()
    tokens_per_s, peak = config.batch_tokens / median, peak_flops(config, entrant.device)
    moments = [value for state in entrant.optimizer.state.values() for value in state.values()]
    return dict(
        variant=entrant.name,
        reads=entrant.reads,
        parameters=sum(p.numel() for p in model.parameters()),
        step_ms=1e3 * median,
        step_ms_quartiles=[1e3 * low, 1e3 * high],
        step_ms_all=[1e3 * s for s in entrant.seconds],
        tokens_per_s=tokens_per_s,
        mfu=peak and flops_a_token(config, model) * tokens_per_s / peak,
        read_bytes=entrant.read_bytes,
        saved_bytes=kept_bytes(lambda: entrant.loss(*entrant.batches[0]), model.parameters()),
        cuda_peak_bytes=cuda_peak(entrant.step, [*model.parameters(), *moments]) if cuda else None,
        peak_rss_bytes=child(argv, entrant.name)["rss"] if alone else None,
    )


def describe_read(entrant, sources, rate):
    """A row: one read by the routes of attention alone."""
    layer, names = entrant.model.layers[0], dict(variant=entrant.name, reads=entrant.reads)
    return names | time_read(layer.attn_read, layer.attn_norm, entrant.model.read, sources, rate, entrant.compiled)


def pairs(entrants):
    """[(top, bottom)] to compare: others / block, routed / prenorm, prenorm / plain, and the reads of one variant.

    Variants are compared only if they use the same read backend.
    """
    routed = [e for e in entrants if e.routed]
    tops = {"block": [e for e in routed if e.variant != "block"], "prenorm": routed}
    tops["plain"] = [e for e in entrants if e.variant == "prenorm"]
    across = [(top, e) for name in tops for e in entrants if e.variant == name for top in tops[name]]
    within = [(b, a) for i, a in enumerate(entrants) for b in entrants[i + 1 :] if a.variant == b.variant]
    return [(top, bottom) for top, bottom in across if bottom.reads in (None, top.reads)] + within


def compare(top, bottom, rate):
    """A row: ratio of speeds, intervals, and the best ratio that the reads' bytes allow."""
    seconds, base = (top.seconds, bottom.seconds), statistics.median(bottom.seconds)
    ratio, low, high = ratio_interval(*seconds)
    comparable = bottom.variant not in ("plain", top.variant)
    best = base / (base + (top.read_bytes - bottom.read_bytes) / rate) if comparable else None
    pair, rounds = f"{top.name}/{bottom.name}", ratio_interval(*seconds, of_rounds)
    return dict(pair=pair, ratio=ratio, low=low, high=high, of_rounds=rounds, best=best)


def time_loader(config, device, step_seconds):
    """Time that reading a step's windows takes, and its share of a step; None where there is no data."""
    if not Path(config.data_dir).is_dir():
        return None
    windows = Windows(config.data_dir, "train", config.context, config.vocab_size)
    batch, steps = config.batch_tokens // config.context, iter(range(10**6))

    def load():
        ids = batch_windows(config.seed, next(steps), batch, len(windows))
        for at in range(0, batch, config.micro_batch):
            train.fetch(windows, ids[at : at + config.micro_batch], device, "bench")

    seconds = median_time(load, device)
    return dict(ms=1e3 * seconds, share=seconds / step_seconds, data_dir=config.data_dir)


# ---- the command line ------------------------------------------------------------------------------------------------


def chosen(options):
    """The names of --variants, each once."""
    names = list(dict.fromkeys(options.variants.split(",")))
    for name in names:
        variant, _, reads = name.partition(":")
        if variant != "plain" and variant not in VARIANTS:
            raise UserError(f"command line: --variants: {variant!r} is none of plain, {', '.join(VARIANTS)}")
        if reads and (variant == "plain" or not VARIANTS[variant].routed):
            raise UserError(f"command line: --variants: {name!r}: {variant} has no depth reads; drop ':{reads}'")
    return names


def circumstances(options, config, name, device, compiled):
    """The head of a report: config, code and machine, before anything is measured."""
    here, code = machine(device) | dict(compiled=compiled), versions(Path(__file__).parent)
    return dict(name=name, device=here, versions=code, config=asdict(config), options=vars(options))


def measure(options, config, name, argv):
    """All of it for one config -> the report, as plain values."""
    config, device, compiled = settle(config)
    report = circumstances(options, config, name, device, compiled)
    entrants = enter(chosen(options), config, device, compiled)
    compiling = []
    for e in entrants:
        print(f"{e.name}: first steps", file=sys.stderr, flush=True)
        with empty_cache() if compiled else nullcontext():
            cold = e.first_steps(options.warmup)
            cached = child(argv, e.name)["compile_s"] if compiled and options.cached else None
        compiling.append(dict(compile_s=cold if compiled else None, cached_compile_s=cached))
    print(f"{options.rounds} rounds of {len(entrants)} steps", file=sys.stderr, flush=True)
    time_rounds(entrants, options.rounds, CLOCKS[options.clock])
    sources = make_sources(config, device)
    rate = copy_rate(sources)
    rows = [describe(e, argv) | seconds for e, seconds in zip(entrants, compiling)]
    reads = [describe_read(e, sources, rate) for e in entrants if e.routed]
    ratios = [compare(top, bottom, rate) for top, bottom in pairs(entrants)]
    loader = time_loader(config, device, rows[0]["step_ms"] / 1e3)
    return report | dict(rows=rows, ratios=ratios, copy_bytes_per_s=rate, reads=reads, loader=loader)


def main(options, config, name, argv):
    if options.child:
        (entrant,) = enter(chosen(options), *settle(config))
        print(json.dumps(dict(compile_s=entrant.first_steps(1), rss=resident())))
        return 0
    if options.json:
        make_folder(Path(options.json).parent, "json")
    report = measure(options, config, name, argv)
    print(table(report), flush=True)
    if options.json:
        with atomic_write(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(or_exit(main, *PARSED, sys.argv[1:]))
