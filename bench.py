"""Variants side by side in one process: speed of whole training steps, memory, compile time, and what the reads must cost.

    python bench.py configs/bench.toml --json=bench.json
    python bench.py configs/s.toml --variants=prenorm,block,rd --device=cuda --compile=true --batch_tokens=65536
    python bench.py configs/xs.toml --scaling=results/speed

A step is one update as train.py does it: forward, backward, clip, optimiser, over batch_tokens random tokens. Each round times
one step of every variant, in a new order, so that whatever slows the machine falls on all alike; a ratio compares medians, and
its interval comes from resampling whole rounds. Beside it stands the median of the rounds' own ratios, from which slow moments
that last longer than a round cancel: the steadier figure on a machine that others share. Intervals need some 20 rounds.

    step ms, quartiles   of one update               tokens/s   batch_tokens over the median step
    saved MiB            what autograd keeps for the backward of one pass, each storage once, without the parameters
    peak MiB             on a GPU CUDA's own over a step, less what the other variants hold; on a CPU, eager, of a process of its own
    compile s            the first step less a later one, with no cache of earlier processes
    MFU                  share of a known GPU's dense bf16 peak, by 6 FLOPs a matrix parameter and 12 L D T a token
    limit by bytes       the ratio if the reads cost only the time to copy the bytes that they must move, at the rate measured here
    one read             all N + 1 sources, forward and backward: ours, stacked and two einsums a route, copying the bytes it must move

Keys of train.py apply (--help); bench.py's own:
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

from lib.config import parse_config
from lib.errors import UserError, or_exit
from lib.files import atomic_write, make_folder
from lib.shards import Windows, batch_windows, load_manifest


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"command line: {message}; see bench.py --help")


def parse(argv):
    """argv -> (options, TrainConfig, name of the config). What is no option of bench.py goes to the config's parser."""
    parser = Parser(prog="bench.py", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--variants", default="plain,prenorm,block,rd", help="names in model.py's VARIANTS; plain: nanoGPT's trunk")
    add("--json", metavar="FILE", default="", help="where everything measured goes")
    add("--rounds", type=int, default=20, help="timed steps of each variant, 2 or more")
    add("--warmup", type=int, default=3, help="untimed steps of each between the first, which compiles, and the timed ones; 1 or more")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where other programs share the cores")
    add("--scaling", metavar="FOLDER", default="", help="also cost against L, N and D, to scaling.png, and 1 -> 2 ranks on the CPU")
    add("--child", choices=("rss", "ranks"), help="for bench.py itself: what this process measures for another")
    options, rest = parser.parse_known_args(argv)
    if any(word.partition("=")[0] == "--variant" for word in rest):
        parser.error("bench.py compares several: --variants=prenorm,block,rd")
    if options.rounds < 2 or options.warmup < 1:
        parser.error(f"--rounds={options.rounds} must be 2 or more, --warmup={options.warmup} 1 or more")
    return options, *parse_config(rest, f"{__doc__}\n{parser.format_help()}")


if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    PARSED = or_exit(parse, sys.argv[1:])

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fused
import train
from model import VARIANTS, DepthRead, ModelConfig, RMSNorm, Source, inverse_rms, read_finished, wide

MiB = 2**20
BF16_PEAK = {  # dense bf16 FLOP/s by NVIDIA's data sheets; the first name that the device's contains
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H800": 989e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


# ---- the trunk to compare with ---------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """x <- x + attention(LayerNorm(x));  x <- x + MLP(LayerNorm(x))."""

    def __init__(self, D, n_head, hidden):
        super().__init__()
        self.n_head = n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, hidden, bias=False), nn.Linear(hidden, D, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (role.view(B, T, self.n_head, -1).transpose(1, 2) for role in self.qkv(self.norm_1(x)).split(D, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """A GPT of nanoGPT's public description: LayerNorm, learned positions, GELU, head tied; equal sizes and parameters.

    Its MLP has two matrices where SwiGLU has three: hidden 3/2 d_mlp, which is the usual 4D where d_mlp is 8/3 D.
    """

    def __init__(self, config):
        super().__init__()
        V, D = ModelConfig(vocab_size=config.vocab_size).padded_vocab, config.d_model
        self.tok_emb, self.pos_emb = nn.Embedding(V, D), nn.Embedding(config.context, D)
        self.blocks = nn.ModuleList(PlainBlock(D, config.n_head, 3 * config.d_mlp // 2) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(D, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, 0.0, config.init_std) if p.ndim == 2 else nn.init.ones_(p)

    def forward(self, idx, targets):
        x = self.tok_emb(idx) + self.pos_emb.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tok_emb.weight)
        return None, F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())


# ---- one variant and its steps ---------------------------------------------------------------------------------------


class Entrant:
    """A variant, its optimiser, one batch of random tokens and the seconds of its steps."""

    def __init__(self, name, config, device, compiled):
        self.name, self.config, self.device = name, replace(config, variant=name if name in VARIANTS else "prenorm"), device
        torch.manual_seed(config.seed)
        self.model = PlainGPT(config) if name == "plain" else train.build_model(self.config)
        self.model.to(device, torch.float64 if config.dtype == "float64" else None)
        self.optimizer = train.build_optimizer(self.model, config)
        passes = config.batch_tokens // (config.micro_batch * config.context)
        ids = torch.randint(config.vocab_size, (passes, config.micro_batch, config.context + 1))
        self.batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids.to(device)]
        self.net, self.seconds, self.compiled = self.model, [], compiled
        self.kernel = name != "plain" and train.pick_fused(self.config, device)
        if self.kernel:
            self.model.read_finished = fused.read_finished
        if compiled and name == "plain":
            self.model.compile(fullgraph=True, dynamic=False)
        elif compiled:
            train.compile_parts(self.model, device)

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


def wait(device):
    if device.type != "cpu":
        (torch.cuda if device.type == "cuda" else torch.mps).synchronize()


def warm_up(entrants, warmup):
    """First steps; returns {name: seconds of the first step less those of a later one}: compiling, mostly."""
    if any(e.compiled for e in entrants):  # what compiling costs once a process (imports, headers) belongs to no variant
        example = torch.ones(64, device=entrants[0].device, requires_grad=True)
        torch.compile(lambda x: (x * 2).exp().sum(), dynamic=False)(example).backward()
    cold = {}
    for e in entrants:
        first, *rest = [e.step() for _ in range(warmup + 1)]
        cold[e.name] = first - min(rest)
    return cold


def time_rounds(entrants, rounds, clock):
    """`rounds` rounds of one step of each, in shuffled order, into their `seconds`."""
    shuffle, order = random.Random(0).shuffle, list(entrants)
    for _ in range(rounds):
        shuffle(order)
        for e in order:
            e.seconds.append(e.step(clock))


def of_medians(top, bottom):
    return np.median(bottom, -1) / np.median(top, -1)


def of_rounds(top, bottom):
    return np.median(bottom / top, -1)


def ratio_interval(top, bottom, ratio=of_medians, draws=4000, level=0.95):
    """Speed of `top` over that of `bottom`, by their seconds: ratio(top, bottom), and its percentile bootstrap interval.

    Rounds are resampled whole: the i-th steps of the two stay together, so what slowed both cancels.
    """
    top, bottom = np.asarray(top), np.asarray(bottom)
    rows = np.random.default_rng(0).integers(len(top), size=(draws, len(top)))
    low, high = np.quantile(ratio(top[rows], bottom[rows]), [(1 - level) / 2, (1 + level) / 2])
    return float(ratio(top, bottom)), float(low), float(high)


# ---- memory ----------------------------------------------------------------------------------------------------------


def saved_bytes(function, left_out=()):
    """Bytes that autograd keeps for the backward of function(): each storage once, without those of the tensors left out."""
    skip, storages = {tensor.untyped_storage().data_ptr() for tensor in left_out}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()  # alive until the count, so that no address is used twice
    del output
    return sum(storages.values())


def cuda_peak(entrant):
    """CUDA's own peak over one step, less what the other variants hold."""
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - sum(t.nbytes for t in held(entrant))
    entrant.step()
    return torch.cuda.max_memory_allocated() - others


def held(entrant):
    states = [value for state in entrant.optimizer.state.values() for value in state.values() if torch.is_tensor(value) and value.is_cuda]
    return [*entrant.model.parameters(), *states]


def child(options, argv, variant, what, launcher=()):
    """bench.py in a process of its own -> the JSON of its last line of output."""
    command = [sys.executable, *launcher, __file__, *argv, f"--variants={variant}", f"--child={what}", f"--rounds={options.rounds}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{what} of {variant}: its process ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def resident():
    """This process's peak resident bytes, from Linux; None elsewhere (getrusage would count the parent's, before exec)."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None


# ---- the least that reads can cost -----------------------------------------------------------------------------------


def reads(config, name):
    """[(K, R)]: sources and routes of every read of a step's pass, in order. Without routing a sublayer reads the one stream."""
    variant, S = VARIANTS.get(name, VARIANTS["prenorm"]), 2 * config.n_layer // config.n_blocks
    if not variant.routed:
        return [(1, 0)] * (2 * config.n_layer + 1)
    plan = [(i // S + 1 + (i % S > 0), 1 if i % 2 else len(variant.groups)) for i in range(2 * config.n_layer)]
    return [*plan, (config.n_blocks + 1, 1)]


def read_bytes(K, R, B, T, D, itemsize):
    """Bytes that one read of K sources by R routes must move, forward and backward, each of (B, T, D) in the sources' dtype.

    Forward K sources are read and R mixtures written; backward the K sources and R gradients are read and the sources' K gradients
    written: 3 K + 2 R. A read that is perfectly fused and keeps nothing else moves this much. (Reads in two phases may move less where
    S > 2: a block's finished sources are taken once for S reads.) The stream of prenorm counts as K = 1, R = 0: its norm reads it too.
    """
    return (3 * K + 2 * R) * B * T * D * itemsize


def step_bytes(config, name, itemsize):
    return sum(read_bytes(K, R, config.batch_tokens // config.context, config.context, config.d_model, itemsize) for K, R in reads(config, name))


def median_time(function, device, repeats=15):
    times = []
    for _ in range(repeats + 3):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def copy_rate(sources):
    """Bytes a second, read and written, of copying the sources one after another: the rate that the limit assumes."""
    targets = [torch.empty_like(s) for s in sources]
    seconds = median_time(lambda: [t.copy_(s) for t, s in zip(targets, sources)], sources[0].device)
    return 2 * sum(s.nbytes for s in sources) / seconds


def our_read(read, norm, states, read_finished=read_finished):
    """RMSNorm of the mixtures of a read, as its sublayer takes them."""
    finished = [Source(s, inverse_rms(wide(s.detach()), read.key_norm.eps)) for s in states]
    return read_finished(finished, [read], norm)[0][0].mixtures


def stacked_read(read, norm, states):
    """The same the usual way: the sources stacked, normalised as keys, two einsums a route, the norm."""
    values = torch.stack(list(states))
    keys, mixtures = read.key_norm(values), []
    for name in read.queries:
        alpha = torch.einsum("d,kbtd->kbt", getattr(read, name).to(keys.dtype), keys).softmax(0, dtype=torch.promote_types(keys.dtype, torch.float32))
        mixtures.append(norm(torch.einsum("kbt,kbtd->btd", alpha.to(values.dtype), values)))
    return mixtures


def time_reads(config, device, compiled):
    """One read alone, forward and backward, all N + 1 sources: ours, the stacked one, and copying the same bytes."""
    K, B, T, D = config.n_blocks + 1, config.micro_batch, config.context, config.d_model
    dtype = getattr(torch, config.dtype)
    states = [torch.randn(B, T, D, device=device).to(dtype).requires_grad_() for _ in range(K)]
    rate, rows = copy_rate([s.detach() for s in states]), []
    for name, groups in (("block", ("qkv",)), ("rd", ("qk", "v"))):
        read, norm = DepthRead(train_to_model(config, name), groups), RMSNorm(train_to_model(config, name))
        read, norm = (module.to(device, torch.float64 if dtype == torch.float64 else None) for module in (read, norm))
        row = dict(variant=name, K=K, B=B, T=T, D=D, copy_ms=1e3 * read_bytes(K, len(groups), B, T, D, dtype.itemsize) / rate)
        kernel = train.pick_fused(replace(config, variant=name), device)
        for key, function in (("ours_ms", our_read), ("stacked_ms", stacked_read)):
            if key == "ours_ms" and kernel:
                function = partial(our_read, read_finished=fused.read_finished)
            elif compiled:
                function = torch.compile(function, fullgraph=True, dynamic=False)
            inputs, gradients = [*states, *read.parameters(), norm.weight], [torch.randn_like(states[0]) for _ in groups]
            row[key] = 1e3 * median_time(lambda: torch.autograd.grad(function(read, norm, states), inputs, gradients), device)
        rows.append(row)
    return rate, rows


def train_to_model(config, variant):
    return ModelConfig(**{f.name: getattr(config, f.name) for f in fields(ModelConfig)} | {"variant": variant})


# ---- everything about one config -------------------------------------------------------------------------------------


def flops_a_token(config, model):
    """6 FLOPs a matrix parameter and 12 L D T for attention, forward and backward: nanoGPT's count, no discount for causality.

    The tied embedding counts once, as the head; a table of positions does not count, nor do the reads.
    """
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "pos_emb" not in name)
    return 6 * matrices + 12 * config.n_layer * config.d_model * config.context


def peak_flops(config, device):
    """Dense bf16 peak of a known GPU, else None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and config.dtype == "bfloat16" else ""
    return next((peak for known, peak in BF16_PEAK.items() if known in name), None)


def describe(entrant, cold, rate, options, argv):
    """One row: what was measured of one variant."""
    config, seconds = entrant.config, np.array(entrant.seconds)
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    row = dict(
        variant=entrant.name, fused=entrant.kernel, parameters=sum(p.numel() for p in entrant.model.parameters()), step_ms=1e3 * median,
        step_ms_quartiles=[1e3 * low, 1e3 * high], step_ms_all=[1e3 * s for s in seconds], tokens_per_s=config.batch_tokens / median,
        compile_s=cold if entrant.compiled else None, read_bytes=step_bytes(config, entrant.name, getattr(torch, config.dtype).itemsize),
    )  # fmt: skip
    peak = peak_flops(config, entrant.device)
    row["mfu"] = peak and flops_a_token(config, entrant.model) * row["tokens_per_s"] / peak
    row["saved_bytes"] = saved_bytes(lambda: entrant.loss(*entrant.batches[0]), entrant.model.parameters())
    row["cuda_peak_bytes"] = cuda_peak(entrant) if entrant.device.type == "cuda" else None
    alone = entrant.device.type == "cpu" and not entrant.compiled  # the compiler's own memory would drown the model's
    row["peak_rss_bytes"] = child(options, argv, entrant.name, "rss")["rss"] if alone else None
    return {key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()}


def compare(entrants, rows, rate):
    """Every pair of interest among the entrants: ratio of speeds, interval, and the best ratio that the read's bytes allow."""
    by_name, byte = {e.name: e for e in entrants}, {row["variant"]: row["read_bytes"] for row in rows}
    routed = [name for name in by_name if name in VARIANTS and VARIANTS[name].routed]
    pairs = [(name, "block") for name in routed if name != "block"] + [(name, "prenorm") for name in routed] + [("prenorm", "plain")]
    result = []
    for top, bottom in pairs:
        if top in by_name and bottom in by_name:
            seconds = by_name[top].seconds, by_name[bottom].seconds
            ratio, low, high = ratio_interval(*seconds)
            base = statistics.median(by_name[bottom].seconds)
            best = base / (base + (byte[top] - byte[bottom]) / rate) if bottom != "plain" else None
            result.append(dict(pair=f"{top}/{bottom}", ratio=ratio, low=low, high=high, of_rounds=ratio_interval(*seconds, of_rounds), best=best))
    return result


def time_loader(config, device, step_seconds):
    """Seconds a step that reading its windows takes, and their share of a step; None where there is no data."""
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


def versions():
    return dict(commit=commit(), python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda)


def cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # Linux
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit():
    """Of the code that is measured, `+` where files of it differ from that; None outside git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done and done.returncode == 0 else None


def machine(device, compiled):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return dict(name=name, cpu=cpu_model(), compiled=compiled, threads=torch.get_num_threads(), cores=os.cpu_count(), load_average=load)


def measure(options, config, name, argv):
    """All of it for one config -> the report, as plain values."""
    device = train.pick_device(config)
    config = settle(config, device)
    compiled = train.pick_compile(config, device)
    if compiled:
        torch._inductor.config.force_disable_caches = True  # cold: nothing from an earlier process
        torch._dynamo.config.recompile_limit = 64  # the variants share code, and each is compiled for itself
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # as train.py does
    before = machine(device, compiled)
    entrants = [Entrant(variant, config, device, compiled) for variant in chosen(options)]
    cold = warm_up(entrants, options.warmup)
    time_rounds(entrants, options.rounds, CLOCKS[options.clock])
    rate, read_rows = time_reads(config, device, compiled)
    rows = [describe(e, cold[e.name], rate, options, argv) for e in entrants]
    return dict(
        name=name, device=before, versions=versions(),
        config=asdict(config), options=vars(options), rows=rows, ratios=compare(entrants, rows, rate), copy_bytes_per_s=rate,
        reads=read_rows, loader=time_loader(config, device, rows[0]["step_ms"] / 1e3),
    )  # fmt: skip


def settle(config, device):
    """The config as train.py would run it. Without data the vocabulary is the config's, or GPT-2's. What keeps the kernel away is said once."""
    manifest = load_manifest(config.data_dir)
    config = train.resolve(config, device, manifest or dict(tokenizer=config.tokenizer or "gpt2", vocab_size=config.vocab_size or 50257))
    return config if train.pick_fused(replace(config, variant="rd"), device) else replace(config, fused="false")


def chosen(options):
    names = options.variants.split(",")
    for name in names:
        if name != "plain" and name not in VARIANTS:
            raise UserError(f"command line: --variants: {name!r} is none of plain, {', '.join(VARIANTS)}")
    return list(dict.fromkeys(names))


# ---- cost against L, N, D and ranks ----------------------------------------------------------------------------------


def grid(config):
    """{key: configs} that differ from config in n_layer, n_blocks or d_model, where 2 n_layer / n_blocks stays whole."""
    L, N, D = config.n_layer, config.n_blocks, config.d_model
    points = {
        "n_layer": [replace(config, n_layer=l) for l in (L // 2, L, 2 * L)],
        "n_blocks": [replace(config, n_blocks=n) for n in (N // 4, N // 2, N, 2 * N, 4 * N) if 0 < n <= 2 * L],
        "d_model": [replace(config, d_model=D * m // 2, d_mlp=config.d_mlp * m // 2) for m in (1, 2, 4)],
    }
    return {key: [c for c in configs if 2 * c.n_layer % c.n_blocks == 0] for key, configs in points.items()}


def scaling(options, config, argv):
    """Ratios over the grid, and the cost of a second rank; draws FOLDER/scaling.png."""
    device = train.pick_device(config)
    config, compiled, clock = settle(config, device), train.pick_compile(config, device), CLOCKS[options.clock]
    make_folder(options.scaling, "scaling")
    rows = []
    for key, configs in grid(config).items():
        for point in configs:
            entrants = [Entrant(variant, point, device, compiled) for variant in ("prenorm", "block", "rd")]
            warm_up(entrants, 1)
            time_rounds(entrants, options.rounds, clock)
            seconds = {e.name: e.seconds for e in entrants}
            for top, bottom in (("rd", "block"), ("block", "prenorm")):
                ratio, low, high = ratio_interval(seconds[top], seconds[bottom], of_rounds)
                rows.append(dict(key=key, value=getattr(point, key), pair=f"{top}/{bottom}", ratio=ratio, low=low, high=high))
            print(f"{key} = {getattr(point, key):<5} rd/block {rows[-2]['ratio']:.3f}  block/prenorm {rows[-1]['ratio']:.3f}", flush=True)
    draw_scaling(rows, Path(options.scaling) / "scaling.png")
    ranks = [child(options, argv, "rd", "ranks", ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")) for n in (1, 2)]
    return dict(grid=rows, ranks=ranks)


def draw_scaling(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys = list(dict.fromkeys(row["key"] for row in rows))
    figure, axes = plt.subplots(1, len(keys), figsize=(10, 3.2), sharey=True, constrained_layout=True)
    for axis, key in zip(axes, keys):
        for pair in dict.fromkeys(row["pair"] for row in rows):
            part = [row for row in rows if (row["key"], row["pair"]) == (key, pair)]
            ratio = np.array([row["ratio"] for row in part])
            error = [ratio - [row["low"] for row in part], [row["high"] for row in part] - ratio]
            axis.errorbar([row["value"] for row in part], ratio, error, marker="o", capsize=3, label=pair)
        values = sorted({row["value"] for row in rows if row["key"] == key})
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, values)
        axis.set_xlabel(dict(n_layer="layers L", n_blocks="blocks N", d_model="width D").get(key, key))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ratio of tokens/s, of rounds, 95 %")
    axes[0].legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)


def measure_ranks(options, config):
    """In a process of torchrun: micro_batch sequences a rank, with and without the collective -> a row on rank 0."""
    device = torch.device("cpu")
    config = replace(config, batch_tokens=config.micro_batch * config.context * train.WORLD, device="cpu", compile="false")
    (name,) = chosen(options)
    entrant = Entrant(name, replace(settle(config, device), batch_tokens=config.micro_batch * config.context), device, False)
    dist.init_process_group("gloo")
    seconds = {"sync": [], "alone": []}
    if train.WORLD > 1:
        entrant.net = DistributedDataParallel(entrant.model, gradient_as_bucket_view=True)
    for _ in range(options.rounds + 2):
        for key in seconds:
            dist.barrier()
            with entrant.net.no_sync() if key == "alone" and train.WORLD > 1 else nullcontext():
                seconds[key].append(entrant.step())
    dist.destroy_process_group()
    sync, alone = (statistics.median(seconds[key][2:]) for key in ("sync", "alone"))
    return dict(variant=name, ranks=train.WORLD, step_ms=1e3 * sync, tokens_per_s=config.batch_tokens / sync, collective_share=1 - alone / sync)


# ---- the command line ------------------------------------------------------------------------------------------------


def table(report):
    """The report for people, 100 columns."""
    config, here = report["config"], report["device"]
    lines = [f"{report['name']}: L {config['n_layer']}, D {config['d_model']}, {config['n_head']} heads, N {config['n_blocks']}, T {config['context']}, "
             f"{config['batch_tokens']} tokens a step", f"{here['name']}, {config['dtype']}, {'compiled' if here['compiled'] else 'eager'}"
             f"{', reads by fused.c' if any(row['fused'] for row in report['rows']) else ''}, "
             f"{here['threads']} thread(s), load {here['load_average'] or 0:.1f}, {report['options']['clock']} time, torch {report['versions']['torch']}", "",
             f"{'variant':<9}{'step ms':>9} {'quartiles':>17}{'tokens/s':>11}{'saved MiB':>11}{'peak MiB':>10}{'compile s':>11}{'MFU':>7}"]  # fmt: skip
    for row in report["rows"]:
        peak = row["cuda_peak_bytes"] or row["peak_rss_bytes"]
        cells = (row["saved_bytes"] / MiB, peak and peak / MiB, row["compile_s"], row["mfu"] and 100 * row["mfu"])
        shown = [f"{'-' if x is None else f'{x:.1f}':>{width}}" for x, width in zip(cells, (11, 10, 11, 7))]
        quartiles = "{:.1f} - {:.1f}".format(*row["step_ms_quartiles"])
        lines.append(f"{row['variant']:<9}{row['step_ms']:>9.1f} {quartiles:>17}{row['tokens_per_s']:>11,.0f}{''.join(shown)}")
    lines += ["", f"{'ratio of speeds':<18}{'of medians, 95 %':<24}{'of rounds, 95 %':<24}limit by bytes at {report['copy_bytes_per_s'] / 1e9:.1f} GB/s"]
    for row in report["ratios"]:
        best = f"{row['best']:.3f}" if row["best"] else "-"
        shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*triple) for triple in ((row["ratio"], row["low"], row["high"]), row["of_rounds"])]
        lines.append(f"{row['pair']:<18}{shown[0]:<24}{shown[1]:<24}{best}")
    for row in report["reads"]:
        lines.append(f"one read of {row['variant']}, K {row['K']}: {row['ours_ms']:.2f} ms, stacked {row['stacked_ms']:.2f} ms, copying its bytes {row['copy_ms']:.2f} ms")
    if report["loader"]:
        lines.append(f"loading a step's windows: {report['loader']['ms']:.2f} ms, {100 * report['loader']['share']:.2f} % of a step")
    return "\n".join(lines)


def main(options, config, name, argv):
    train.keep_freed_memory(train.pick_device(config))  # as train.py does
    if options.child:
        if options.child == "rss":
            (variant,) = chosen(options)
            device = train.pick_device(config)
            entrant = Entrant(variant, settle(config, device), device, False)
            entrant.step(), entrant.step()
            print(json.dumps(dict(rss=resident())))
        else:
            row = measure_ranks(options, config)
            if train.RANK == 0:
                print(json.dumps(row))
        return 0
    if options.json:
        make_folder(Path(options.json).parent, "json")
    report = measure(options, config, name, argv)
    print(table(report), flush=True)
    for extra in [None, scaling] if options.scaling else [None]:  # written before the long part, and again with it
        if extra:
            report["scaling"] = extra(options, config, argv)
        if options.json:
            with atomic_write(options.json, "w") as file:
                json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(or_exit(main, *PARSED, sys.argv[1:]))
