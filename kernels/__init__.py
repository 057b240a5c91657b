"""Faster depth reads: one file a backend, each a function with the arguments of model.py's `depth_read`.

model.py is the definition and knows nothing of these. `use` gives a model its backend, after comparing it with the
definition, so that whoever edits model.py gets what is written there.

    plain   depth_read itself
    cpu     cpu.c, for float32 and float64 on a CPU with a C compiler
"""

import copy

import torch

import model as definition
from lib.errors import UserError, log, warn

TOLERANCE = {torch.float32: 4e-3, torch.float64: 1e-9}  # relative, in the 2-norm: a few times the largest rounding


def use(reads, gpt, device, dtype):
    """Have `gpt` read by backend `reads`: "plain", "cpu", or "auto", which takes cpu where it can be had.

    Returns the backend in use. Where its reads are not those of model.py, one line says so and the reads are plain.
    Raises UserError where "cpu" is asked for and cannot be.
    """
    routed = [m for m in gpt.modules() if isinstance(m, definition.DepthRead)]
    fits = device.type == "cpu" and dtype in TOLERANCE
    if reads == "plain" or not routed or (reads == "auto" and not fits):
        return "plain"
    if not fits:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"config key reads: cpu is for float32 and float64 on a CPU, not {name} on {device.type}; use --reads=plain"
        )
    from kernels import cpu

    try:
        kinds = {len(read.names): read for read in routed}
        apart = [what for read in kinds.values() if (what := difference(read, cpu.depth_read, dtype))]
    except UserError as error:
        if reads == "cpu":
            raise UserError(f"config key reads: {error}; use --reads=plain") from error
        warn(f"{error}: the depth reads are plain PyTorch, which is slower when nothing is compiled")
        return "plain"
    if apart:
        log(f"model.py's depth read was changed: kernels/cpu.c computes {apart[0]}; this run takes model.py's")
        return "plain"
    gpt.read = cpu.depth_read
    return "cpu"


def difference(read, backend, dtype):
    """In words, what a backend computes otherwise than depth_read in a DepthRead module like `read`; None: nothing.

    Both read the same random sources with random parameters. Logits reach beyond 10 over nine sources, so that a cap, a
    clamp or a top-k shows. Some sources are so small that norm_eps counts.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    read = copy.deepcopy(read).to("cpu", dtype)
    D = read.key_norm.weight.numel()
    norm = copy.deepcopy(read.key_norm)
    with torch.no_grad():
        for parameter in (*read.parameters(), *norm.parameters()):
            is_query = any(parameter is getattr(read, name) for name in read.names)
            parameter.copy_(random(*parameter.shape) * (4 * D**-0.5 if is_query else 1))
    scales = (1, 3, 10 * read.key_norm.eps**0.5) * 3
    sources = [(random(2, 9, D) * scale).detach().requires_grad_() for scale in scales]
    trained = [p for p in (*read.parameters(), *norm.parameters()) if p.requires_grad]
    results, weights = [], None
    for function in (definition.depth_read, backend):
        try:
            inputs, _ = read(sources, norm, function)
            weights = weights or [random(*x.shape) for x in inputs]
            gradients = torch.autograd.grad(inputs, [*sources, *trained], weights, allow_unused=True)
        except (TypeError, ValueError, RuntimeError) as error:
            if function is definition.depth_read:
                raise
            return f"nothing for its arguments ({type(error).__name__})"
        results.append(([x.detach() for x in inputs], gradients))
    (inputs, gradients), (its_inputs, its_gradients) = results
    if unlike(inputs, its_inputs, dtype):
        return "other inputs"
    return "other gradients" if unlike(gradients, its_gradients, dtype) else None


def unlike(expected, got, dtype):
    """Whether any tensor of the second list is not that of the first, in the 2-norm, up to rounding."""
    if len(expected) != len(got):
        return True
    for e, g in zip(expected, got):
        if (e is None) != (g is None) or (e is not None and e.shape != g.shape):
            return True
        if e is not None and not (g - e).norm() <= TOLERANCE[dtype] * e.norm() + 1e-30:
            return True
    return False
