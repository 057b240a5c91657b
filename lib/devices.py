"""What the machine offers a run: its device, its number type, its compiler, its processor's name."""

import os
import platform
import shutil
from pathlib import Path

from lib.errors import UserError


def pick_device(name, key="--device", rank=0):
    """The torch.device `name`: auto is a GPU where there is one, and cuda is the GPU of local rank `rank`.

    Raises UserError, naming `key`, for a device that is not here.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{key}: {name!r} is none of auto, cpu, cuda, cuda:N, mps") from None
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    here = counts.get(device.type, 0)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank)
    if (device.index or 0) >= here:
        raise UserError(f"{key}: {device} is not available here ({here} of its kind are); try --device=cpu")
    return device


def pick_dtype(config, device):
    """The name of the run's number type: `bfloat16` stands for autocast over float32 weights.

    Raises UserError for one that the device lacks.
    """
    import torch

    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("config key dtype: this GPU has no bfloat16; use --dtype=float32")
    if dtype == "float64" and device.type == "mps":
        raise UserError("config key dtype: mps has no float64; use --dtype=float32")
    return dtype


def pick_compile(config, device):
    """Whether the model is compiled. Raises UserError where that was asked for and cannot be."""
    compiler = os.environ.get("CXX", "g++")
    if config.compile == "true" and device.type == "cpu" and not shutil.which(compiler):
        why = f"on a CPU torch.compile needs a C++ compiler, and {compiler} is not here"
        raise UserError(f"config key compile: {why}; use --compile=false")
    return config.compile == "true" or (config.compile == "auto" and device.type == "cuda")


def ask_for_determinism(wanted):
    """Switch torch's deterministic algorithms on or off. Call before any GPU work."""
    import torch

    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)


def cpu_model():
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # Linux
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
