"""Faster depth reads: one file per backend, each a function with the arguments of model.py's `depth_read`.

model.py is the definition and knows nothing of these. `use` gives a model its backend, after comparing it with the
definition, so that whoever edits model.py gets what is written there.

    plain   depth_read itself
    cpu     cpu.c, for float32 and float64 on a CPU with a C compiler

To add one: a file here with a function of depth_read's arguments, whose alphas may be None; its name among the choices
of the key `reads` in lib/config.py; in `use`, when it fits and where it is imported; in TOLERANCE, its dtypes.
"""

import copy

import torch

import model
from lib.errors import UserError, log, warn

TOLERANCE = {torch.float32: 4e-3, torch.float64: 1e-9}  # relative, in the 2-norm: a few times the largest rounding


def use(reads, gpt, device, dtype):
    """Have `gpt` read by backend `reads`: "plain", "cpu", or "auto", which takes cpu where it can be had.

    Returns the backend in use. Where its reads are not those of model.py, one line says so and the reads are plain,
    also where "cpu" was asked for. Raises UserError where "cpu" is asked for and this machine or dtype cannot have it.
    """
    modules = [m for m in gpt.modules() if isinstance(m, model.DepthRead)]
    fits = device.type == "cpu" and dtype in TOLERANCE
    if reads == "plain" or not modules or (reads == "auto" and not fits):
        return "plain"
    if not fits:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"config key reads: cpu is for float32 and float64 on a CPU, not {name} on {device.type}; use --reads=plain"
        )
    from kernels import cpu

    try:
        kinds = {(type(m), len(m.names)): m for m in modules}  # one module of each class and number of routes
        apart = [what for m in kinds.values() if (what := difference(m, cpu.depth_read, dtype))]
    except UserError as error:
        if reads == "cpu":
            raise UserError(f"config key reads: {error}; use --reads=plain") from error
        warn(f"{error}: the depth reads are plain PyTorch, which is slower when nothing is compiled")
        return "plain"
    if apart:
        log(f"model.py's depth read was changed: kernels/cpu.c no longer fits ({apart[0]}); this run takes model.py's")
        return "plain"
    gpt.read = cpu.depth_read
    return "cpu"


def difference(module, backend, dtype):
    """Compare `backend` with depth_read inside a DepthRead module like this one, forward and gradients.

    Returns None where they agree, else what differs, for a message. Sources and parameters are random. Logits reach
    beyond 10 over nine sources, so that a cap, a clamp or a top-k shows. Some sources are so small that eps counts.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    module = copy.deepcopy(module).to("cpu", dtype)
    norm = copy.deepcopy(module.key_norm)
    D = norm.weight.numel()
    queries = [getattr(module, name) for name in module.names]
    with torch.no_grad():
        for parameter in (*module.parameters(), *norm.parameters()):
            loud = any(parameter is query for query in queries)
            parameter.copy_(random(*parameter.shape) * (4 * D**-0.5 if loud else 1))
    scales = (1, 3, 10 * norm.eps**0.5) * 3
    sources = [(random(2, 9, D) * scale).detach().requires_grad_() for scale in scales]
    trained = [p for p in (*module.parameters(), *norm.parameters()) if p.requires_grad]
    results, weights = [], None
    for read in (model.depth_read, backend):
        try:
            inputs, _ = module(sources, norm, read)
            weights = weights or [random(*x.shape) for x in inputs]
            gradients = torch.autograd.grad(inputs, [*sources, *trained], weights, allow_unused=True)
        except (TypeError, ValueError, RuntimeError) as error:
            if read is model.depth_read:
                raise
            return f"it does not take its arguments: {type(error).__name__}"
        results.append(([x.detach() for x in inputs], gradients))
    (inputs, gradients), (its_inputs, its_gradients) = results
    if differ(inputs, its_inputs, dtype):
        return "the outputs differ"
    return "the gradients differ" if differ(gradients, its_gradients, dtype) else None


def differ(expected, got, dtype):
    """Whether two lists of tensors differ by more than TOLERANCE, relative, in the 2-norm."""
    if len(expected) != len(got):
        return True
    for e, g in zip(expected, got):
        if (e is None) != (g is None) or (e is not None and e.shape != g.shape):
            return True
        if e is not None and not (g - e).norm() <= TOLERANCE[dtype] * e.norm() + 1e-30:
            return True
    return False
