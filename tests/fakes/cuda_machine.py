"""A machine with NVIDIA GPUs as processes see it: the driver's files, and torch as the CUDA build that PyPI has."""

import importlib.util
import os
from pathlib import Path

DRIVER_TEXT = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\n"
    "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
)
# As on a real machine: a process sees GPUs unless they are hidden from it.
IS_AVAILABLE = """

def is_available() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") != ""
"""
CUSTOMISE = """
from pathlib import Path
import servicekit.cuda
servicekit.cuda._DRIVER = Path({driver!r})
servicekit.cuda._NODES = Path({driver!r})
servicekit.cuda.driver_cuda = lambda: 13000
"""


def driver_files(folder: Path, gpus: int, release: str = "580.159.03") -> Path:
    """Make what /proc/driver/nvidia has. Returns: the folder in its place."""
    for gpu in range(gpus):
        (folder / "gpus" / f"0000:{gpu:02x}:00.0").mkdir(parents=True)
    (folder / "version").write_text(DRIVER_TEXT.format(release), encoding="utf-8")
    return folder


def cuda_machine(folder: Path, gpus: int = 4) -> dict[str, str]:
    """Make such a machine in a folder, without kernels in its environment.

    Returns: the environment of its processes.
    """
    driver = driver_files(folder / "driver", gpus)
    packages = folder / "packages"
    _cuda_build(packages / "torch")
    (packages / "sitecustomize.py").write_text(CUSTOMISE.format(driver=str(driver)), encoding="utf-8")
    hidden = ("CUDA_VISIBLE_DEVICES", "TANDEM_DEVICE")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = [str(packages), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def _cuda_build(torch: Path) -> None:
    """Link to the torch that is installed; it says that it is built for CUDA, and that there are GPUs."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    version = (installed / "version.py").read_text(encoding="utf-8")
    changed = {
        "version.py": f"{version}\ncuda = '13.0'\n",
        "cuda/__init__.py": (installed / "cuda" / "__init__.py").read_text(encoding="utf-8") + IS_AVAILABLE,
    }
    for name in ("", "cuda"):
        (torch / name).mkdir(parents=True)
        for entry in (installed / name).iterdir():
            inside = f"{name}/{entry.name}".lstrip("/")
            if entry.name != "__pycache__" and inside not in (*changed, "cuda"):
                (torch / inside).symlink_to(entry)
    for name, text in changed.items():
        (torch / name).write_text(text, encoding="utf-8")
