"""One read of nine sources and the norm after it, forward and backward, interleaved: ours, by fused.c and by PyTorch's operations,
against the stacked operator of the PyPI package attn-res.

    pip install --no-deps attn-res==0.1.0
    OMP_NUM_THREADS=1 python results/speed/against_attn_res.py
"""

import random
import sys
import time
from pathlib import Path

import torch
from attn_res import AttnResOperator

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench
import fused
from model import DepthRead, ModelConfig, RMSNorm

config = ModelConfig(vocab_size=257, n_layer=8, n_head=8, d_model=256, d_mlp=688, variant="block")
read, norm, theirs = DepthRead(config), RMSNorm(config), AttnResOperator(config.d_model, config.norm_eps)
torch.nn.init.normal_(read.query, std=0.1)
theirs.pseudo_query.data.copy_(read.query.data)  # and our gain is 1: the same read
states = [torch.randn(4, 256, config.d_model, requires_grad=True) for _ in range(9)]
gradient = torch.randn_like(states[0])
reads = {
    "fused": (lambda: bench.our_read(read, norm, states, fused.read_finished)[0], read.query),
    "ours": (lambda: bench.our_read(read, norm, states)[0], read.query),
    "attn-res": (lambda: norm(theirs(torch.stack(states))), theirs.pseudo_query),
}
seconds, order = {name: [] for name in reads}, list(reads)
results = [torch.autograd.grad(function(), [*states, query, norm.weight], gradient) for function, query in reads.values()]
assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for other in results[1:] for a, b in zip(results[0], other))
for _ in range(40):
    random.shuffle(order)
    for name in order:
        function, query = reads[name]
        began = time.perf_counter()
        torch.autograd.grad(function(), [*states, query, norm.weight], gradient)
        seconds[name].append(time.perf_counter() - began)
for name, (function, _) in reads.items():
    print(f"{name:<9}{1e3 * sorted(seconds[name][5:])[17]:8.2f} ms, kept {bench.saved_bytes(function, states) / bench.MiB:.1f} MiB")
for name in ("fused", "ours"):
    print(f"{name} against attn-res, times as fast: {{:.2f}} [{{:.2f}}, {{:.2f}}]".format(*bench.ratio_interval(seconds[name][5:], seconds["attn-res"][5:])))
