"""What this machine and this Python environment have for NVIDIA GPUs, without importing torch or initialising CUDA."""

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Without these SGLang does not start on a GPU (the extra `gpu` of pyproject.toml).
KERNELS = ("sgl_kernel", "flashinfer")
# The oldest driver that serves a major version of CUDA, by that version (CUDA's release notes, "minor version
# compatibility").
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
_RELEASE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)")
WITHOUT_COMPILERS = "SGLang compiles kernels for GPUs when it starts, and cannot here"
# In the toolkit's cuda.h, 13000 for CUDA 13.0.
_VERSION = re.compile(r"^#define CUDA_VERSION (\d+)\d{3}$", re.MULTILINE)
# What an image brings of what SGLang compiles (deploy/images/compile_kernels.py), and where SGLang looks.
COMPILED, JIT_CACHE = Path(sys.prefix) / "jit", "SGLANG_JIT_CACHE_DIR"
_DRIVER, _NODES, _USUAL = Path("/proc/driver/nvidia"), Path("/dev"), Path("/usr/local/cuda")


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """What decides whether the GPUs of a machine can be used.

    Attributes:
        torch: CUDA that torch is built for, as "13.0"; "": built without; None: torch is not installed.
        missing: those of KERNELS that cannot be imported.
        driver: text of /proc/driver/nvidia/version; "": it cannot be read.
        driver_cuda: newest CUDA of the driver's library, as 13000; 0: the library does not load or does not answer.
    """

    torch: str | None
    missing: tuple[str, ...] = ()
    driver: str = ""
    driver_cuda: int = 0


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that are visible here, and those of them that can be used: all or none.

    Attributes:
        usable: ids, as CUDA_VISIBLE_DEVICES takes them.
        present: how many are visible, or of which CUDA_VISIBLE_DEVICES chooses none by mistake.
        why_not: why those cannot be used; "" if they can be, or there is none.
    """

    usable: tuple[str, ...] = ()
    present: int = 0
    why_not: str = ""


def find_gpus(environ: Mapping[str, str] = os.environ) -> Gpus:
    """Find the GPUs of this machine that a run in this environment can use; none if TANDEM_DEVICE is "cpu"."""
    if environ.get("TANDEM_DEVICE") == "cpu":
        return Gpus()
    count, chosen = _count(), environ.get("CUDA_VISIBLE_DEVICES", "")
    ids = visible_ids(count, environ.get("CUDA_VISIBLE_DEVICES"))
    if count and not ids and chosen.strip() and not chosen.strip().startswith("-"):
        why_not = f"CUDA_VISIBLE_DEVICES={chosen} begins with what is no GPU here, or names one twice: CUDA shows none"
        return Gpus(present=count, why_not=why_not)
    why_not = unusable(facts()) if ids else ""
    return Gpus(usable=() if why_not else ids, present=len(ids), why_not=why_not)


def visible_ids(count: int, chosen: str | None) -> tuple[str, ...]:
    """Return the ids of the GPUs that CUDA would show.

    Args:
        count: GPUs of the machine.
        chosen: CUDA_VISIBLE_DEVICES; None: not set. CUDA stops at the first id that is none, as -1, and shows nothing
            if one is there twice.

    >>> visible_ids(2, None), visible_ids(4, "3, 1"), visible_ids(4, "2,-1,0"), visible_ids(2, "0,0")
    (('0', '1'), ('3', '1'), ('2',), ())
    """
    if chosen is None or count == 0:
        return tuple(str(index) for index in range(count))
    ids: list[str] = []
    for part in chosen.split(","):
        name = part.strip()
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdecimal() and int(name) < count):
            break
        ids.append(name)
    return tuple(ids) if len(set(ids)) == len(ids) else ()


def unusable(known: CudaFacts) -> str:
    """Say which condition for a run on GPUs does not hold; "" if all do."""
    if known.torch is None:
        return "torch is not installed in this Python environment"
    if not known.torch:
        return "torch is a build without CUDA"
    if known.missing:
        return f"{' and '.join(known.missing)}, kernels of SGLang, cannot be imported in this Python environment"
    return driver_problem(known.torch, known.driver, known.driver_cuda)


def driver_problem(cuda: str, driver: str, driver_cuda: int) -> str:
    """Say why the driver does not serve torch's CUDA; "" if it does. Arguments as in CudaFacts."""
    if not driver_cuda:
        return "the driver's library libcuda.so.1 cannot be loaded: is this a container that was given no GPU?"
    major = int(cuda.partition(".")[0])
    # The library decides: it may be newer than the module in the kernel (CUDA's forward compatibility).
    if driver_cuda // 1000 >= major:
        return ""
    release = _RELEASE.search(driver)
    found = "the driver" if release is None else f"driver {release[1]}"
    needed = f": it needs driver {_LEAST_DRIVER[major]} or newer" if major in _LEAST_DRIVER else ""
    return f"{found} serves CUDA {driver_cuda // 1000}, and torch is built for CUDA {cuda}{needed}"


def facts() -> CudaFacts:
    """Look at this environment and this machine."""
    return CudaFacts(
        torch=_cuda_of_torch(),
        missing=tuple(name for name in KERNELS if importlib.util.find_spec(name) is None),
        driver=driver_text(),
        driver_cuda=driver_cuda(),
    )


def driver_text() -> str:
    """Read /proc/driver/nvidia/version; "": there is none."""
    try:
        return (_DRIVER / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def driver_cuda() -> int:
    """Ask the driver's library for the newest CUDA that it serves, as 13000; 0: it does not load or answer."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value


def newest_generation() -> int:
    """Ask NVML for the newest GPU's generation, 9 for Hopper; 0: it does not answer.

    NVML initialises no CUDA, which reads its variables when it is, and needs no program on PATH as nvidia-smi is.
    """
    count, major, minor, device = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    newest = 0
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for index in range(count.value):
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
                nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
                newest = max(newest, major.value)
    return newest


def _count() -> int:
    """Count the GPUs: the driver's, which containers may see of other containers too, and their device files."""
    known = len(list((_DRIVER / "gpus").iterdir())) if (_DRIVER / "gpus").is_dir() else 0
    nodes = sum(node.name.removeprefix("nvidia").isdecimal() for node in _NODES.glob("nvidia*"))
    return min(known, nodes) if known and nodes else max(known, nodes)


def _cuda_of_torch() -> str | None:
    """Read torch.version.cuda without importing torch, as in CudaFacts."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return "" if found is None else found[1]


@dataclass(frozen=True, kw_only=True)
class Compilers:
    """With what kernels can be compiled at run time, as SGLang, flashinfer and Triton do.

    Attributes:
        toolkit: CUDA toolkit; None: none fits.
        missing: what is not found, by name.
        ignored: toolkits that were found and do not fit, with why.
    """

    toolkit: Path | None
    missing: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def find_compilers(
    cuda: str,
    environ: Mapping[str, str],
    packages: Sequence[Path],
    include: Path,
    usual: Path,
) -> Compilers:
    """Choose a CUDA toolkit: the user's, as SGLang looks for it, if it fits torch; else that of torch's wheels.

    Args:
        cuda: that of torch, as "13.0".
        packages: folders of NVIDIA's wheels (the package `nvidia`).
        include: where Python's own header should be, which Triton compiles with.
        usual: where a toolkit is installed.
    """
    path = _with_scripts(environ.get("PATH", ""))
    given = [
        (f"{name}={environ[name]}", Path(environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)
    ]
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is not None:
        given.append((f"{nvcc} on PATH", Path(nvcc).resolve().parent.parent))
    others = [usual, *(wheels / f"cu{cuda.partition('.')[0]}" for wheels in packages)]
    given += [(str(home), home) for home in others if home.is_dir()]
    ignored: list[str] = []
    tried: set[Path] = set()
    toolkit = None
    for name, home in given:
        if home.resolve() in tried:  # CUDA_HOME, PATH and the usual folder are often the same
            continue
        tried.add(home.resolve())
        wrong = _unfit(home, cuda)
        if not wrong:
            toolkit = home
            break
        ignored.append(f"{name} {wrong}")
    missing = [name for name in ("g++", "ninja") if shutil.which(name, path=path) is None]
    missing += [] if (include / "Python.h").is_file() else ["Python.h (package python3-dev)"]
    return Compilers(toolkit=toolkit, missing=(*(() if toolkit else ("nvcc",)), *missing), ignored=tuple(ignored))


def compilers_here(environ: Mapping[str, str] = os.environ) -> Compilers:
    """Look for them in this environment."""
    return find_compilers(_cuda_of_torch() or "", environ, _wheels(), Path(sysconfig.get_path("include")), _USUAL)


def compile_environment(found: Compilers, folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the variables with which kernels are compiled and linked on a machine that has a driver only.

    Args:
        folder: gets links by the names with which the linker asks for the libraries of CUDA and of the driver; only a
            toolkit has those. Existing variables come first.
    """
    folder.mkdir(exist_ok=True)
    for library in [
        *(library for wheels in _wheels() for library in wheels.glob("cu*/lib/libcudart.so.*")),
        _driver_library(),
    ]:
        link = folder / f"{library.name.partition('.so')[0]}.so"
        if library.is_file() and not link.exists():
            link.symlink_to(library)
    variables = {
        "PATH": _with_scripts(environ.get("PATH", "")),
        "LIBRARY_PATH": ":".join(filter(None, [environ.get("LIBRARY_PATH"), str(folder)])),
    }
    return variables if found.toolkit is None else {**variables, "CUDA_HOME": str(found.toolkit)}


def compiled_environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Make the variable with which SGLang finds the kernels of this image; none if it brings none, or the user set it.

    Args:
        folder: gets links to them, and what SGLang compiles next to them: the image's own folder is read-only.
    """
    if environ.get(JIT_CACHE) or not COMPILED.is_dir():
        return {}
    for kernel in COMPILED.glob("*/*/build-*/deps-*"):
        link = folder / kernel.relative_to(COMPILED)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(kernel)
    return {JIT_CACHE: str(folder)}


def _unfit(home: Path, cuda: str) -> str:
    """Say why a toolkit cannot compile for torch's CUDA; "" if it can."""
    if not os.access(home / "bin" / "nvcc", os.X_OK):
        return "has no bin/nvcc"
    header = home / "include" / "cuda.h"
    version = _VERSION.search(header.read_text(encoding="utf-8", errors="replace")) if header.is_file() else None
    if version is None:
        return "has no include/cuda.h"
    return (
        "" if version[1] == cuda.partition(".")[0] else f"is of CUDA {version[1]}, and torch is built for CUDA {cuda}"
    )


def _wheels() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _with_scripts(path: str) -> str:
    """Put this environment's programs first on a PATH: of one that is not activated, they are not on it."""
    own = str(Path(sys.executable).parent)
    return path if own in path.split(":") else f"{own}:{path}"


def _driver_library() -> Path:
    """Find the file of the driver's library, as the loader does. Returns: a path that may not exist."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if "/libcuda.so" in line:
                return Path(line[line.index("/") :])
    return Path("libcuda.so.1")
