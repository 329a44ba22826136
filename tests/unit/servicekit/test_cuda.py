"""Which GPUs a run may use: a table of environments and drivers, and what is read of this machine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servicekit import cuda
from servicekit.cuda import (
    CudaFacts,
    Gpus,
    compile_environment,
    compiled_environment,
    find_compilers,
    find_gpus,
    unusable,
)
from tests.fakes.cuda_machine import DRIVER_TEXT, driver_files

GOOD = CudaFacts(torch="13.0", driver=DRIVER_TEXT.format("580.65.06"), driver_cuda=13000)
NONE_CHOSEN = "CUDA_VISIBLE_DEVICES={} begins with what is no GPU here, or names one twice: CUDA shows none"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
CASES = [
    (GOOD, ""),
    (replace(GOOD, torch="13.2"), ""),
    (replace(GOOD, driver_cuda=13020), ""),
    (replace(GOOD, torch="12.8"), ""),
    # CUDA's forward compatibility: a library that is newer than the module in the kernel.
    (replace(GOOD, driver=OLD), ""),
    # gVisor shows no /proc/driver/nvidia.
    (replace(GOOD, driver=""), ""),
    (replace(GOOD, torch=None), "torch is not installed in this Python environment"),
    (replace(GOOD, torch=""), "torch is a build without CUDA"),
    (
        replace(GOOD, missing=("sgl_kernel",)),
        "sgl_kernel, kernels of SGLang, cannot be imported in this Python environment",
    ),
    (replace(GOOD, missing=("sgl_kernel", "flashinfer")), "sgl_kernel and flashinfer, kernels of SGLang, cannot"),
    (
        replace(GOOD, driver=OLD, driver_cuda=12020),
        "driver 535.104.05 serves CUDA 12, and torch is built for CUDA 13.0: it needs driver 580 or newer",
    ),
    (replace(GOOD, torch="14.1"), "driver 580.65.06 serves CUDA 13, and torch is built for CUDA 14.1"),
    (replace(GOOD, driver="", driver_cuda=12080), "the driver serves CUDA 12, and torch is built for CUDA 13.0"),
    (replace(GOOD, driver_cuda=0), "the driver's library libcuda.so.1 cannot be loaded"),
]


@pytest.mark.parametrize(("known", "why"), CASES, ids=[why or f"good {n}" for n, (_, why) in enumerate(CASES)])
def test_the_condition_that_fails_is_named(known: CudaFacts, why: str) -> None:
    said = unusable(known)
    assert said.startswith(why)
    assert bool(said) == bool(why)


@pytest.mark.parametrize(
    ("variables", "known", "found"),
    [
        ({}, GOOD, Gpus(usable=("0", "1"), present=2)),
        ({"CUDA_VISIBLE_DEVICES": "1"}, GOOD, Gpus(usable=("1",), present=1)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5ebe"}, GOOD, Gpus(usable=("GPU-5ebe",), present=1)),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, GOOD, Gpus(usable=("1",), present=1)),
        ({"CUDA_VISIBLE_DEVICES": ""}, replace(GOOD, torch=""), Gpus()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, GOOD, Gpus()),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, GOOD, Gpus(present=2, why_not=NONE_CHOSEN.format("0,0"))),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, GOOD, Gpus(present=2, why_not=NONE_CHOSEN.format("2,3"))),
        ({"TANDEM_DEVICE": "cpu"}, replace(GOOD, torch=""), Gpus()),
        ({}, replace(GOOD, torch=""), Gpus(present=2, why_not="torch is a build without CUDA")),
    ],
)
def test_the_driver_s_gpus_are_used_as_cuda_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], known: CudaFacts, found: Gpus
) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", driver_files(tmp_path / "driver", 2))
    monkeypatch.setattr(cuda, "_NODES", tmp_path)
    monkeypatch.setattr(cuda, "facts", lambda: known)
    assert find_gpus(variables) == found


@pytest.mark.parametrize(("in_proc", "nodes", "count"), [(8, 2, 2), (8, 0, 8), (0, 1, 1), (0, 0, 0), (2, 2, 2)])
def test_a_container_has_the_gpus_whose_device_files_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_proc: int, nodes: int, count: int
) -> None:
    if in_proc:
        driver_files(tmp_path / "driver", in_proc)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{node + 3}" for node in range(nodes))):
        (tmp_path / name).touch()
    monkeypatch.setattr(cuda, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(cuda, "_NODES", tmp_path)
    monkeypatch.setattr(cuda, "facts", lambda: GOOD)
    assert find_gpus({}) == Gpus(usable=tuple(str(gpu) for gpu in range(count)), present=count)


@pytest.mark.parametrize(
    ("line", "found"),
    [("cuda: Optional[str] = None", ""), ("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8")],
)
def test_torch_s_build_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "torch" / "version.py").write_text(
        f"from typing import Optional\n__all__ = ['cuda']\n{line}\nhip = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cuda.facts().torch == found


def program(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def toolkit(home: Path, version: int = 13000) -> Path:
    """A CUDA toolkit, as far as it is looked at."""
    program(home / "bin", "nvcc")
    (home / "include").mkdir(exist_ok=True)
    (home / "include" / "cuda.h").write_text(f"/* */\n#define CUDA_VERSION {version}\n")
    return home


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with NVIDIA's wheels, toolkits of two versions, what is wrong in several ways, and programs."""
    toolkit(tmp_path / "wheels" / "cu13")
    toolkit(tmp_path / "own")
    toolkit(tmp_path / "old", 12080)
    program(tmp_path / "wrapper" / "bin", "nvcc")
    (tmp_path / "empty").mkdir()
    program(tmp_path / "programs", "g++", "ninja")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "chosen", "ignored"),
    [
        ({}, "wheels/cu13", []),
        ({"CUDA_HOME": "own"}, "own", []),
        ({"CUDA_PATH": "own"}, "own", []),
        ({"CUDA_HOME": "own", "CUDA_PATH": "old"}, "own", []),
        ({"PATH": "own/bin"}, "own", []),
        ({"CUDA_HOME": "empty"}, "wheels/cu13", ["has no bin/nvcc"]),
        ({"CUDA_HOME": "nowhere"}, "wheels/cu13", ["has no bin/nvcc"]),
        ({"CUDA_HOME": "old"}, "wheels/cu13", ["is of CUDA 12, and torch is built for CUDA 13.0"]),
        ({"CUDA_HOME": "old", "PATH": "old/bin"}, "wheels/cu13", ["is of CUDA 12, and torch is built for CUDA 13.0"]),
        ({"CUDA_HOME": "old", "PATH": "own/bin"}, "own", ["is of CUDA 12, and torch is built for CUDA 13.0"]),
        # As a script in /usr/local/bin, whose folder SGLang would take for a toolkit's.
        ({"PATH": "wrapper/bin"}, "wheels/cu13", ["has no include/cuda.h"]),
    ],
)
def test_the_user_s_toolkit_wins_where_it_fits(
    machine: Path, variables: dict[str, str], chosen: str, ignored: list[str]
) -> None:
    environ = {name: str(machine / value) for name, value in variables.items()}
    environ["PATH"] = ":".join(filter(None, [environ.get("PATH"), str(machine / "programs")]))
    found = find_compilers("13.0", environ, [machine / "wheels"], machine / "include", usual=machine / "usual")
    assert (found.toolkit, found.missing) == (machine / chosen, ())
    assert len(found.ignored) == len(ignored)
    assert all(why in said for why, said in zip(ignored, found.ignored, strict=True))


def test_the_usual_folder_comes_before_the_wheels(machine: Path) -> None:
    usual = toolkit(machine / "usual")
    found = find_compilers("13.0", {}, [machine / "wheels"], machine / "include", usual=usual)
    assert found.toolkit == usual


def test_what_is_missing_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(machine / "bin" / "python"))
    found = find_compilers("13.0", {"PATH": ""}, [], machine, usual=machine / "usual")
    assert (found.toolkit, found.missing) == (None, ("nvcc", "g++", "ninja", "Python.h (package python3-dev)"))
    program(machine / "bin", "g++", "ninja")
    found = find_compilers("13.0", {"PATH": ""}, [], machine / "include", usual=machine / "usual")
    assert found.missing == ("nvcc",)


def test_libraries_link_by_the_names_that_the_linker_asks_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/own/bin/python")
    monkeypatch.setattr(cuda, "_wheels", lambda: [machine / "wheels"])
    monkeypatch.setattr(cuda, "_driver_library", lambda: machine / "libcuda.so.580.65")
    (machine / "libcuda.so.580.65").touch()
    runtime = machine / "wheels" / "cu13" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir()
    runtime.touch()
    found = find_compilers("13.0", {"PATH": "/bin"}, [machine / "wheels"], machine, usual=machine)
    given = {"PATH": "/bin", "LIBRARY_PATH": "/theirs"}
    for _ in range(2):  # an engine that starts again
        variables = compile_environment(found, machine / "links", given)
    assert variables == {
        "CUDA_HOME": str(machine / "wheels" / "cu13"),
        "LIBRARY_PATH": f"/theirs:{machine / 'links'}",
        "PATH": "/own/bin:/bin",
    }
    links = {link.name: link.resolve() for link in (machine / "links").iterdir()}
    assert links == {"libcudart.so": runtime.resolve(), "libcuda.so": (machine / "libcuda.so.580.65").resolve()}


def test_what_the_image_brings_is_found_in_a_cache_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, folder = tmp_path / "image", tmp_path / "own"
    monkeypatch.setattr(cuda, "COMPILED", image)
    assert compiled_environment(folder, {}) == {}
    leaf = Path("sm90a/rope/build-1/deps-2")
    (image / leaf).mkdir(parents=True)
    (image / leaf / "rope.so").touch()
    (image / "sm90a/rope/build-1/.lock").touch()
    for _ in range(2):  # an engine that starts again
        assert compiled_environment(folder, {}) == {"SGLANG_JIT_CACHE_DIR": str(folder)}
    assert (folder / leaf).resolve() == image / leaf
    assert [path.is_symlink() for path in (folder / leaf).parent.iterdir()] == [True]
    (folder / leaf).parent.joinpath(".lock").touch()
    assert compiled_environment(tmp_path / "other", {"SGLANG_JIT_CACHE_DIR": "/theirs"}) == {}
    assert not (tmp_path / "other").exists()


class Nvml:
    """NVML, with GPUs of these generations."""

    def __init__(self, generations: list[int]) -> None:
        self._generations = generations

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._generations)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._generations[device.value - 1], 0
        return 0


@pytest.mark.parametrize(("generations", "newest"), [([9, 9], 9), ([8, 10, 9], 10), ([], 0)])
def test_the_generation_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch, generations: list[int], newest: int) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml(generations))
    assert cuda.newest_generation() == newest


def test_without_nvml_the_generation_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda.newest_generation() == 0
