"""SGLang's out-of-tree platform for hosts without a GPU: plain torch, no AMX, no sgl_kernel.

SGLang calls `activate` in every process that imports it (entry point group `sglang.srt.platforms`).
"""

import enum
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


def activate() -> str | None:
    """Return the name of the platform class; None if there is a GPU, for SGLang's own platform."""
    import torch

    if torch.cuda.is_available():
        return None
    _install_stub()
    return "rollout_service.sglang_cpu.platform:TandemCpuPlatform"


class _InterpolationMode(enum.Enum):
    """The names that SGLang's imports read."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _install_stub() -> None:
    """Put an empty `torchvision` in `sys.modules` unless a real one is installed.

    Two multimodal modules that SGLang imports at start-up (`configs/deepseek_ocr.py`, `multimodal/internvl_utils.py`)
    need it; PyPI has no CPU build of torchvision that goes with a CPU torch, and text models never use it.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    # transformers checks for torchvision once: let it do so before the stub exists.
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    functional = _module("torchvision.transforms.functional", InterpolationMode=_InterpolationMode)
    transforms = _module("torchvision.transforms", functional=functional, InterpolationMode=_InterpolationMode)
    _module("torchvision", transforms=transforms)


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module
