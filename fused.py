"""Phase 1 of the depth reads as one C kernel, for CPUs: what model.py's mix_finished computes, in one pass over memory each way.

fused.c holds the kernel. CC or cc compiles it when a run starts, in half a second for each number of routes of one phase 1: two or three a model.
"""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from lib.errors import UserError, one_line
import model

REALS = {torch.float32: "float", torch.float64: "double"}
SOURCE = Path(__file__).with_name("fused.c")
# Sums in any order, but not -ffast-math: NaN stays NaN, and linking with it would flush small numbers to zero in the whole process.
FLAGS = "-O3 -fno-math-errno -fassociative-math -fno-signed-zeros -fno-trapping-math -shared -fPIC".split()
FASTER = "-march=native -funroll-loops -fopenmp".split()  # where the compiler knows them; clang may come without OpenMP, the last


@functools.cache
def library(dtype, D, R, normed):
    """fused.c for float32 or float64, width D, R routes, `normed` normalised mixtures and this machine. Raises UserError where that cannot be."""
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or not shutil.which(compiler[0]):
            raise UserError(f"fused.c needs a C compiler, and {' '.join(compiler) or 'CC'} is not here")
        with tempfile.TemporaryDirectory() as folder:  # once it is loaded a library needs its file no more
            for more in (FASTER, FASTER[:-1], []):
                sizes = [f"-DREAL={REALS[dtype]}", f"-DWIDTH={D}", f"-DROUTES={R}", f"-DNORMALISED={normed}"]
                command = [*compiler, *sizes, *FLAGS, *more, "-o", f"{folder}/fused.so", str(SOURCE), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
                if not done.returncode:
                    loaded = ctypes.CDLL(f"{folder}/fused.so")
                    return loaded if loaded.forward and loaded.backward else None  # a C++ compiler would have given them other names
        raise UserError(f"fused.c does not compile: {one_line(done.stderr) or f'{compiler[0]} ended with status {done.returncode}'}")
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:  # CC is no C compiler, or no folder for what it makes
        raise UserError(f"fused.c cannot be compiled and loaded: {one_line(error)}") from error


def prepare(config, dtype):
    """Compile the kernel for every phase 1 of a model of this config. Raises UserError where that cannot be."""
    variant, S = model.VARIANTS[config.variant], 2 * config.n_layer // config.n_blocks
    routes = [len(variant.groups), 1] * config.n_layer
    for block in [*(routes[i : i + S] for i in range(0, len(routes), S)), [1]]:  # and the final read
        library(dtype, config.d_model, sum(block), 0 if variant.averaged else block[0])


def call(name, ctx, states, inverses, directions, *arguments):
    """Function `name` of the library, its arguments in fused.c's order: a tensor as a pointer, a list of tensors (or None) as an array of them."""

    def pointer(x):
        if torch.is_tensor(x):
            return ctypes.c_void_p(x.data_ptr())
        return (ctypes.c_void_p * len(x))(*(None if t is None else t.data_ptr() for t in x))

    R, D = directions.shape
    sizes = (ctypes.c_long(n) for n in (ctx.threads, states[0].numel() // D, len(states)))
    function = getattr(library(directions.dtype, D, R, ctx.normed), name)
    function(*sizes, ctypes.c_double(ctx.eps), *map(pointer, (states, inverses, directions, *arguments)))


class MixFinished(torch.autograd.Function):
    """directions g * w (R, D), gain (D,) and eps of the RMSNorm that the first `normed` mixtures get, K, K states (B, T, D) and their K inverse
    rms (B, T, 1) -> lse (B, T, R), logits (K, B, T, R), a view of the kernel's (B, T, K, R), R mixtures (B, T, D), and the K states again.

    Later reads take the states that are returned here: so their gradients arrive here, and this read's share is added in the same pass, to
    new tensors, as others may hold the old ones. Mixtures are not kept for the backward: those that it needs are sooner computed again.
    """

    @staticmethod
    def forward(ctx, directions, gain, eps, normed, K, *sources):
        ctx.eps, ctx.normed, ctx.threads = eps, normed, torch.get_num_threads()
        directions, gain, *sources = (x.contiguous() for x in (directions, gain, *sources))
        states, inverses, R = sources[:K], sources[K:], len(directions)
        lse, mixtures = states[0].new_empty(*states[0].shape[:2], R), [torch.empty_like(states[0]) for _ in range(R)]
        logits = lse.new_empty(*states[0].shape[:2], K, R)
        call("forward", ctx, states, inverses, directions, gain, logits, lse, mixtures)
        ctx.save_for_backward(directions, gain, logits, lse, *sources)
        ctx.set_materialize_grads(False)
        logits_by_source = logits.permute(2, 0, 1, 3)
        ctx.mark_non_differentiable(logits_by_source)
        return lse, logits_by_source, *mixtures, *states

    @staticmethod
    @model.first_order
    def backward(ctx, d_lse, _, *gradients):
        directions, gain, logits, lse, *sources = ctx.saved_tensors
        K, R = logits.shape[-2:]
        states, inverses = sources[:K], sources[K:]
        d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.contiguous()
        d_mixtures = [torch.zeros_like(states[0]) if d is None else d.contiguous() for d in gradients[:R]]
        passed = [d if d is None else d.contiguous() for d in gradients[R:]]
        work = gain.new_empty(ctx.threads, R, len(gain))
        sums, d_states = gain.new_zeros(ctx.threads, R + 1, len(gain)), [torch.empty_like(s) for s in states]
        call("backward", ctx, states, inverses, directions, gain, logits, lse, d_lse, d_mixtures, passed, work, sums, d_states)
        d_directions, d_gain = sums.sum(0).split((R, 1))
        return d_directions, d_gain[0], None, None, None, *d_states, *[None] * K


def mix_finished(directions, states, inverses, first_read, norm):
    """model.mix_finished by the kernel where all is float32, or all float64, on a CPU; elsewhere model.py's."""
    if any(x.device.type != "cpu" or x.dtype != directions.dtype for x in (*states, *inverses, norm.weight)):
        return model.mix_finished(directions, states, inverses, first_read, norm)
    K, R, groups = len(states), len(directions), len(first_read.queries)
    normed = 0 if first_read.averaged else groups  # the average control takes the mean before the norm
    lse, logits, *rest = MixFinished.apply(directions, norm.weight, norm.eps, normed, K, *states, *inverses)
    mixtures = rest[:R] if normed else [*first_read.inputs(rest[:groups], norm), *rest[groups:R]]
    return lse, logits, mixtures, rest[R:]


read_finished = functools.partial(model.read_finished, mix=mix_finished)
