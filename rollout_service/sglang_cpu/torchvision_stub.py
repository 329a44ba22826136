"""An empty `torchvision` for the two multimodal modules that SGLang imports at start-up.

`configs/deepseek_ocr.py` and `multimodal/internvl_utils.py` import it unconditionally; PyPI has no CPU build of
torchvision that goes with a CPU torch, and text models never use it.
"""

import enum
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class InterpolationMode(enum.Enum):
    """The names that SGLang's imports read."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def install_stub() -> bool:
    """Put the stub in `sys.modules` unless a real torchvision is installed. Returns: whether it was needed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return False
    # transformers checks for torchvision once: let it do so before the stub exists.
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    functional = _module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
    transforms = _module("torchvision.transforms", functional=functional, InterpolationMode=InterpolationMode)
    _module("torchvision", transforms=transforms)
    return True


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module
