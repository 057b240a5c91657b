"""Measuring: seconds, ratios with intervals, memory, and where and of what code it was measured."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import timeit
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from lib.devices import cpu_model
from lib.errors import UserError

# ---- time ------------------------------------------------------------------------------------------------------------


def wait(device):
    """Return when the device has done what it was given."""
    if device.type != "cpu":
        (torch.cuda if device.type == "cuda" else torch.mps).synchronize()


def median_time(function, device, repeats=15):
    """Median seconds of function(), after three runs that do not count."""
    return statistics.median(timeit.repeat(lambda: (function(), wait(device)), number=1, repeat=repeats + 3)[3:])


def of_medians(top, bottom, axis=-1):
    return np.median(bottom, axis) / np.median(top, axis)


def of_rounds(top, bottom, axis=-1):
    return np.median(np.divide(bottom, top), axis)


def ratio_interval(top, bottom, ratio=of_medians, draws=4000):
    """Speed of `top` over that of `bottom`, by their seconds -> ratio(top, bottom), low, high.

    The interval is the 95 % percentile bootstrap. Rounds are resampled whole: the i-th steps of the two stay together,
    and what slowed both cancels.
    """
    top, bottom = np.asarray(top), np.asarray(bottom)
    found = stats.bootstrap((top, bottom), ratio, paired=True, n_resamples=draws, method="percentile", rng=0)
    return float(ratio(top, bottom)), *map(float, found.confidence_interval)


# ---- memory ----------------------------------------------------------------------------------------------------------


def kept_bytes(function, left_out=()):
    """Bytes that autograd keeps for the backward of function(): each storage once, without those of `left_out`."""
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


def cuda_peak(function, tensors):
    """CUDA's peak bytes during function(), less what the process holds beside `tensors`."""
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - sum(t.nbytes for t in tensors if t.is_cuda)
    function()
    return torch.cuda.max_memory_allocated() - others


def resident():
    """This process's peak resident bytes, from Linux, else None. (getrusage would count its parent too.)"""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None


def in_child(*words):
    """What `python WORDS...` prints as JSON in its last line. Raises UserError where its exit status is not 0."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise UserError(f"python {' '.join(words)} ended with status {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- circumstances ---------------------------------------------------------------------------------------------------


def commit(folder):
    """Commit hash of `folder`, with + if files were changed; None outside git."""
    git = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done and done.returncode == 0 else None


def versions(folder):
    return dict(commit=commit(folder), python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda)


def machine(device):
    return dict(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu=cpu_model(),
        threads=torch.get_num_threads(),
        cores=os.cpu_count(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        malloc={name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    )
