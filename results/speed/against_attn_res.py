"""One read of nine sources and the norm after it, forward and backward, interleaved: by each backend that this machine
has, and by the stacked operator of the PyPI package attn-res.

    pip install --no-deps attn-res==0.1.0
    OMP_NUM_THREADS=1 python results/speed/against_attn_res.py
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from attn_res import AttnResOperator

sys.path.insert(0, str(Path(__file__).parents[2]))
import kernels
from lib.measurement import kept_bytes, ratio_interval
from model import GPT, ModelConfig

ROUNDS, WARMUP = 40, 5

config = ModelConfig(vocab_size=257, n_layer=1, n_head=8, d_model=256, d_mlp=688, n_blocks=1, variant="block")
gpt = GPT(config)
read, norm = gpt.layers[0].attn_read, gpt.layers[0].attn_norm
theirs = AttnResOperator(config.d_model, config.norm_eps)
torch.nn.init.normal_(read.query, std=0.1)
theirs.pseudo_query.data.copy_(read.query.data)  # the key gains are one in both: the same read
sources = [torch.randn(4, 256, config.d_model, requires_grad=True) for _ in range(9)]
gradient = torch.randn_like(sources[0])


def ours(backend):
    return lambda: read(sources, norm, backend)[0][0]


reads = {"plain": (ours(gpt.read), read.query)}
name = kernels.use("auto", gpt, torch.device("cpu"), torch.float32)
reads[name] = (ours(gpt.read), read.query)
reads["attn-res"] = (lambda: norm(theirs(torch.stack(sources))), theirs.pseudo_query)


def gradients(name):
    function, query = reads[name]
    return torch.autograd.grad(function(), [*sources, query, norm.weight], gradient)


for other in reads:
    torch.testing.assert_close(gradients(other), gradients("plain"), atol=1e-3, rtol=1e-3)
seconds, order = {name: [] for name in reads}, list(reads)
for _ in range(WARMUP + ROUNDS):
    random.shuffle(order)
    for name in order:
        began = time.perf_counter()
        gradients(name)
        seconds[name].append(time.perf_counter() - began)
seconds = {name: times[WARMUP:] for name, times in seconds.items()}
for name, (function, query) in reads.items():
    kept = kept_bytes(function, [*sources, query, norm.weight]) / 2**20
    print(f"{name:<9}{1e3 * np.median(seconds[name]):8.2f} ms, kept {kept:.1f} MiB")
for name in reads:
    if name != "attn-res":
        ratio, low, high = ratio_interval(seconds[name], seconds["attn-res"])
        print(f"{name} against attn-res, times as fast: {ratio:.2f} [{low:.2f}, {high:.2f}]")
