"""The depth read as one C kernel, cpu.c: for float32 and float64 on a CPU that has a C compiler.

A read is the torch operator `rd_attnres::depth_read`. It has a fake for torch.compile and an autograd formula in closed
form, so it works eagerly, inside a model compiled as one graph, and under DDP. CC or cc compiles cpu.c when a run
starts, in half a second for each number of routes.
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

import model
from lib.errors import UserError, one_line

REALS = {torch.float32: "float", torch.float64: "double"}
SOURCE = Path(__file__).with_name("cpu.c")
# Sums in any order, but no -ffast-math: NaN stays NaN. Linking with it would flush small numbers to zero everywhere.
FLAGS = "-O3 -fno-math-errno -fassociative-math -fno-signed-zeros -fno-trapping-math -shared -fPIC".split()
FASTER = "-march=native -funroll-loops -fopenmp".split()  # clang may come without OpenMP, the last


@functools.cache
def library(dtype, D, R, normalised):
    """cpu.c compiled for a dtype, width D, R routes, normalised or not. Raises UserError where that cannot be."""
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or not shutil.which(compiler[0]):
            raise UserError(f"kernels/cpu.c needs a C compiler, and {' '.join(compiler) or 'CC'} is not here")
        with tempfile.TemporaryDirectory() as folder:  # a loaded library no longer needs its file
            for more in (FASTER, FASTER[:-1], []):
                sizes = [f"-DREAL={REALS[dtype]}", f"-DWIDTH={D}", f"-DROUTES={R}", f"-DNORMALISED={int(normalised)}"]
                command = [*compiler, *sizes, *FLAGS, *more, "-o", f"{folder}/cpu.so", str(SOURCE), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
                if not done.returncode:
                    loaded = ctypes.CDLL(f"{folder}/cpu.so")
                    if loaded.forward and loaded.backward:  # a C++ compiler would have given them other names
                        return loaded
        why = one_line(done.stderr) or f"{compiler[0]} ended with status {done.returncode}"
        raise UserError(f"kernels/cpu.c does not compile: {why}")
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:  # CC is no C compiler
        raise UserError(f"kernels/cpu.c cannot be compiled and loaded: {one_line(error)}") from error


def call(name, sources, w, normalised, eps, *arguments):
    """Function `name` of the library, with cpu.c's arguments: a tensor as a pointer, a list as an array of pointers."""

    def pointer(x):
        if torch.is_tensor(x):
            return ctypes.c_void_p(x.data_ptr())
        return (ctypes.c_void_p * len(x))(*(t.data_ptr() for t in x))

    R, D = w.shape
    sizes = (ctypes.c_long(n) for n in (torch.get_num_threads(), sources[0].numel() // D, len(sources)))
    function = getattr(library(w.dtype, D, R, normalised), name)
    function(*sizes, ctypes.c_double(eps), *map(pointer, (sources, w, *arguments)))


OPERATOR, BACKWARD = "rd_attnres::depth_read", "rd_attnres::depth_read_backward"
ARGUMENTS = "Tensor[] sources, Tensor[] queries, Tensor key_gain, float eps, Tensor? norm_gain"
torch.library.define(OPERATOR, f"({ARGUMENTS}) -> Tensor[]")
torch.library.define(BACKWARD, f"(Tensor[] d_outputs, Tensor scalars, {ARGUMENTS}) -> Tensor[]")


def empty_outputs(sources, queries):
    B, T, D = sources[0].shape
    K, R = len(sources), len(queries)
    return [*(sources[0].new_empty(B, T, D) for _ in queries), sources[0].new_empty(B, T, K * R + R + K)]


@torch.library.impl(OPERATOR, "cpu")
def run_forward(sources, queries, key_gain, eps, norm_gain):
    """K sources (B, T, D), R queries (D,) -> R mixtures (B, T, D), normalised if norm_gain, and cpu.c's scalars."""
    sources, w = [s.contiguous() for s in sources], torch.stack(queries) * key_gain
    outputs = empty_outputs(sources, queries)
    gain = key_gain if norm_gain is None else norm_gain.contiguous()  # unread where nothing is normalised
    call("forward", sources, w, norm_gain is not None, eps, gain, outputs[-1], outputs[:-1])
    return outputs


@torch.library.impl(BACKWARD, "cpu")
def run_backward(d_outputs, scalars, sources, queries, key_gain, eps, norm_gain):
    """Gradients of the R mixtures -> of the K sources, and (R + 1, D): of the directions g * w and of norm_gain."""
    sources, w = [s.contiguous() for s in sources], torch.stack(queries) * key_gain
    threads, (R, D) = torch.get_num_threads(), w.shape
    gain = key_gain if norm_gain is None else norm_gain.contiguous()
    work, sums = w.new_empty(threads, R, D), w.new_zeros(threads, R + 1, D)
    d_sources, d_outputs = [torch.empty_like(s) for s in sources], [d.contiguous() for d in d_outputs]
    call(
        "backward", sources, w, norm_gain is not None, eps, gain, scalars.contiguous(), d_outputs, work, sums, d_sources
    )
    return [*d_sources, sums.sum(0)]


@torch.library.register_fake(OPERATOR)
def _(sources, queries, key_gain, eps, norm_gain):
    return empty_outputs(sources, queries)


@torch.library.register_fake(BACKWARD)
def _(d_outputs, scalars, sources, queries, key_gain, eps, norm_gain):
    like = torch.contiguous_format
    return [
        *(torch.empty_like(s, memory_format=like) for s in sources),
        key_gain.new_empty(len(queries) + 1, len(key_gain)),
    ]


def setup_context(ctx, inputs, output):
    sources, queries, key_gain, ctx.eps, norm_gain = inputs
    ctx.K, ctx.R, ctx.normalised = len(sources), len(queries), norm_gain is not None
    ctx.save_for_backward(*sources, *queries, key_gain, output[-1], *([norm_gain] if ctx.normalised else []))


def backward(ctx, gradients):
    """The autograd formula: gradients of the operator's outputs -> of its arguments."""
    sources, (*queries, key_gain, scalars), norm_gain = split(ctx.saved_tensors, ctx.K, ctx.R + 2)
    d_outputs = [torch.zeros_like(sources[0]) if d is None else d for d in gradients[: ctx.R]]
    norm_gain = norm_gain[0] if ctx.normalised else None
    *d_sources, sums = torch.ops.rd_attnres.depth_read_backward(
        d_outputs, scalars, sources, queries, key_gain, ctx.eps, norm_gain
    )
    d_w, d_norm_gain = sums[: ctx.R], sums[ctx.R] if ctx.normalised else None
    d_queries = [d * key_gain for d in d_w]
    d_key_gain = (d_w * torch.stack(queries)).sum(0)
    return d_sources, d_queries, d_key_gain, None, d_norm_gain


def split(tensors, K, R):
    return list(tensors[:K]), tensors[K : K + R], tensors[K + R :]


def no_second_derivative(ctx, *_):
    """Without this PyTorch would warn and take the second derivative for zero."""
    raise RuntimeError("kernels/cpu.c has first derivatives only: model.py's depth_read (--reads=plain) has all")


torch.library.register_autograd(OPERATOR, backward, setup_context=setup_context)
torch.library.register_autograd(BACKWARD, no_second_derivative)


def depth_read(sources, queries, key_gain, eps, norm=None):
    """model.py's depth_read by the kernel. The alphas are None: the kernel keeps logits for its backward alone.

    An RMSNorm is computed in the kernel, any other norm after it. What is not all float32 or all float64 (autocast
    holds sources in half precision) goes to model.py's depth_read.
    """
    inside = type(norm) is model.RMSNorm and norm.eps == eps and not (norm._forward_hooks or norm._forward_pre_hooks)
    gain = norm.weight if inside else None
    dtypes = {x.dtype for x in (*sources, *queries, key_gain, *([gain] if inside else []))}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return model.depth_read(sources, queries, key_gain, eps, norm)
    inputs = torch.ops.rd_attnres.depth_read(sources, queries, key_gain, eps, gain)[:-1]
    return inputs if inside or norm is None else [norm(h) for h in inputs], None
