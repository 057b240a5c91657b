"""Which device a run is on."""

from lib.errors import UserError


def pick_device(name, key="--device", rank=0):
    """The torch.device `name`; auto is a GPU where there is one. `cuda` is the GPU of this local rank. UserError, naming the key, for one that is not here."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{key}: {name!r} is none of auto, cpu, cuda, cuda:N, mps") from None
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 0)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank)
    if (device.index or 0) >= here:
        raise UserError(f"{key}: {device} is not available here ({here} of its kind are); try --device=cpu")
    return device
