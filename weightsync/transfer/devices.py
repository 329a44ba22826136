"""The device of a rank: whether it is the one that was asked for, and that every thread works on it.

CUDA's current device is each thread's own, and 0 at first. SGLang sets it in a scheduler's main thread only, while
phases of a round run in gRPC's threads: there, whatever is done without a device is done to GPU 0.
"""

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from servicekit.errors import ConfigError


def check_device(wanted: str) -> None:
    """`wanted` is TANDEM_DEVICE: "cuda" demands a GPU, "auto" takes what there is.

    Raises: ConfigError: what this process has instead of a GPU.
    """
    if wanted != "cuda" or torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA: is this the CPU variant of the image?"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("NVIDIA_VISIBLE_DEVICES", "unset"))
        why = f"torch sees none of them (visible devices: {visible or 'none'}): does the pod request nvidia.com/gpu?"
    raise ConfigError(f"TANDEM_DEVICE=cuda asks for a GPU, and {why}")


def gpu_name() -> str:
    """Of the first GPU that this process sees; "" without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device this thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def wait_for_device(device: torch.device) -> None:
    """Returns when everything that was queued on the device is done, on every stream; at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Returns when what this thread has queued on its stream of the device is done; at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
