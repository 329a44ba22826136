"""Whether this process runs where it was told to: without a word, torch would take the CPU if there is no GPU."""

import os

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
