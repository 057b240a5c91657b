"""What depth reads cost: the bytes that they must move, and the time and memory of one read."""

import torch

from lib.measurement import kept_bytes, median_time
from model import at_least_float32


def plan_of(model):
    """[(K, R)]: sources and routes of every read of a pass, in order. Without reads a sublayer takes the one stream."""
    if not model.variant.routed:
        return [(1, 0)] * (2 * model.config.n_layer + 1)
    plan, read = [], model.read

    def counted(sources, queries, *rest):
        plan.append((len(sources), len(queries)))
        return read(sources, queries, *rest)

    model.read = counted
    with torch.no_grad():
        model.forward(torch.zeros(1, 1, dtype=torch.long, device=model.tok_emb.weight.device))
    model.read = read
    return plan


def read_bytes(K, R, B, T, D, itemsize):
    """Bytes that one read of K sources by R routes must move, forward and backward, each of (B, T, D).

    Forward reads K sources and writes R mixtures. Backward reads the K sources and R gradients, and writes K gradients:
    3 K + 2 R. The stream of prenorm counts as K = 1, R = 0: its norm reads it too.
    """
    return (3 * K + 2 * R) * B * T * D * itemsize


def step_bytes(config, plan):
    """Bytes that the reads of one update must move."""
    B, itemsize = config.batch_tokens // config.context, getattr(torch, config.dtype).itemsize
    return sum(read_bytes(K, R, B, config.context, config.d_model, itemsize) for K, R in plan)


def make_sources(config, device):
    """N + 1 random sources (micro_batch, context, d_model)."""
    shape, dtype = (config.micro_batch, config.context, config.d_model), getattr(torch, config.dtype)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(config.n_blocks + 1)]


def copy_rate(sources):
    """Bytes per second, read and written, of copying the sources one after another: the least that a read can take."""
    originals = [s.detach() for s in sources]
    targets = [torch.empty_like(s) for s in originals]
    seconds = median_time(lambda: [t.copy_(s) for t, s in zip(targets, originals)], originals[0].device)
    return 2 * sum(s.nbytes for s in originals) / seconds


def stacked_read(read, sources, norm):
    """A DepthRead the usual way: the sources stacked, normalised as keys, two einsums per route, the norm."""
    values, inputs = torch.stack(sources), []
    keys = read.key_norm(values)
    for query in [getattr(read, name) for name in read.names]:
        alpha = at_least_float32(torch.einsum("d,kbtd->kbt", query.to(keys.dtype), keys)).softmax(0)
        inputs.append(norm(torch.einsum("kbt,kbtd->btd", alpha.to(values.dtype), values)))
    return inputs


def time_read(read, norm, backend, sources, rate, compiled):
    """A row: ms of one read, forward and backward, and the bytes it keeps beside sources and parameters.

    ours      DepthRead `read`, computed by `backend`, with `norm` of each mixture
    stacked   stacked_read
    copy      the bytes that the read must move, at `rate` bytes per second
    """
    (B, T, D), K, R = sources[0].shape, len(sources), len(read.names)
    inputs = [*sources, *(p for p in read.parameters() if p.requires_grad), norm.weight]
    gradients = [torch.randn_like(sources[0]) for _ in range(R)]
    row = dict(K=K, B=B, T=T, D=D, copy_ms=1e3 * read_bytes(K, R, B, T, D, sources[0].element_size()) / rate)

    def measure(name, function):
        function = torch.compile(function, fullgraph=True, dynamic=False) if compiled else function
        seconds = median_time(lambda: torch.autograd.grad(function(), inputs, gradients), sources[0].device)
        row.update({f"{name}_ms": 1e3 * seconds, f"{name}_kept_bytes": kept_bytes(function, inputs)})

    measure("ours", lambda: read(sources, norm, backend)[0])
    measure("stacked", lambda: stacked_read(read, sources, norm))
    return row
