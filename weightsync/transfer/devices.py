"""The device of a rank: check that it is the requested one, and select it in every thread.

CUDA's current device is per thread, and 0 at first. SGLang sets it in a scheduler's main thread only, while phases of a
round run in gRPC's threads: work without an explicit device would run on GPU 0 there.
"""

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from servicekit.cuda import driver_cuda, driver_problem, driver_text
from servicekit.errors import ConfigError


def check_device(wanted: str) -> None:
    """Check that the requested device is present.

    Args:
        wanted: TANDEM_DEVICE: "cuda" requires a GPU, "cpu" that none is seen, "auto" takes what there is.
    Raises: ConfigError: there is no GPU, or one of CUDA_VISIBLE_DEVICES is missing, and why; there is one.
    """
    available = torch.cuda.is_available()
    if wanted == "cpu" and available:
        raise ConfigError("TANDEM_DEVICE=cpu, but torch sees a GPU and would use it: set CUDA_VISIBLE_DEVICES= (empty)")
    if wanted != "cuda":
        return
    if available:
        chosen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if torch.cuda.device_count() < len(chosen):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={','.join(chosen)} names {len(chosen)} GPUs, and CUDA sees "
                f"{torch.cuda.device_count()}: it leaves out all from the first on that is not there (nvidia-smi -L "
                "lists them), and gives a process one MIG device at most"
            )
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA: is this the CPU variant of the image?"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("NVIDIA_VISIBLE_DEVICES", "unset"))
        problem = driver_problem(torch.version.cuda, driver_text(), driver_cuda())
        why = f"torch sees none of them (visible devices: {visible or 'none'}): " + (
            problem or "are they on this machine, does the pod request nvidia.com/gpu?"
        )
    raise ConfigError(f"TANDEM_DEVICE=cuda asks for a GPU, but {why}")


def gpu_name() -> str:
    """Return the name of the first GPU that this process sees; "" without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def gpus_of(num_ranks: int) -> int:
    """Return how many GPUs so many ranks hold: one each where there are GPUs, none on CPUs."""
    return num_ranks if torch.cuda.is_available() else 0


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the device this thread's current one while the context is open."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def wait_for_device(device: torch.device) -> None:
    """Wait until all work queued on the device is done, on every stream; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait until the work queued on this thread's stream of the device is done; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
