"""SGLang compiles at run time in exactly the environment that `tandem run` and `engine_environment` make.

On a machine with a driver and no toolkit, by a python whose environment is not activated. A compilation needs no GPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.run.devices import plan_devices
from launcher.run.processes import Launch, plan_processes
from servicekit.cuda import CudaFacts, compilers_here, facts, unusable
from tandem_config.loading import load_config

# Seconds of one core: SGLang's imports, and nvcc.
COMPILE_S = 900.0
# As an engine's ranks load it; CUDA is asked for the GPU's generation only.
RANK = """
import os, sys
from pathlib import Path
import servicekit.cuda
servicekit.cuda._USUAL = Path("/nowhere")  # where this machine may have a toolkit
servicekit.cuda.COMPILED = Path(sys.argv[3])
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.options import engine_environment
from tandem_config.loading import load_config
config = load_config(None, ["model.path=m", "data.train=t.jsonl"])
os.environ.update(engine_environment(config, HostRanks(), "127.0.0.1", Path(sys.argv[1]), True))
print(f"CUDA_HOME={os.environ['CUDA_HOME']}")
print(f"CACHE={os.environ['SGLANG_JIT_CACHE_DIR']}")
import torch
major, minor = map(int, sys.argv[2].split("."))
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_, **__: (major, minor)
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda *_, **__: "NVIDIA H100 80GB HBM3"
import sglang.kernels.jit.utils
from sglang.kernels.ops.attention import rope
print(rope._jit_fused_rope_module(True, 128, torch.bfloat16, torch.bfloat16))
"""
# What rollout.Dockerfile runs, where no driver is, for a kernel of its own and one with CUB; that it has the others.
FILL = """
import inspect, sys
from pathlib import Path
import servicekit.cuda
servicekit.cuda._USUAL = Path("/nowhere")
sys.path.insert(0, "deploy/images")
import compile_kernels
names = ("attention.rope._jit_fused_rope_module", "moe.moe_topk_softmax._jit_moe_topk_softmax_module")
compile_kernels.fill(Path(sys.argv[1]), "9.0", {name: compile_kernels.KERNELS[name][-1:] for name in names})
for build in compile_kernels.builders(compile_kernels.KERNELS):
    inspect.signature(build.func).bind(*build.args)
"""


def driver_only(tmp_path: Path) -> dict[str, str]:
    """A shell's environment where nothing is activated and no toolkit is on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "g++", "gcc", "c++", "cc", "as", "ld", "cat", "rm", "mv", "uname"):
        (programs / name).symlink_to(Path("/usr/bin") / name)
    left_out = ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH", "PATH")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"PATH": str(programs)}


def run(code: str, environ: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A Python program in that environment."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=COMPILE_S, check=False)


def launched(tmp_path: Path) -> dict[str, str]:
    """Environment of a rollout service that `tandem run` starts from there."""
    config = load_config(None, ["model.path=m", "data.train=t.jsonl"])
    launch = Launch(run_id="r", run_dir=tmp_path, redis_url="unix:///r", resume=False)
    rollout = next(
        spec for spec in plan_processes(config, launch, plan_devices(config, ["0", "1"])) if "rollout" in spec.name
    )
    return {**driver_only(tmp_path), **rollout.env}


@pytest.mark.timeout(2 * COMPILE_S)
def test_rope_compiles_and_links_without_a_toolkit(tmp_path: Path) -> None:
    environ = {**launched(tmp_path), "SGLANG_JIT_CACHE_DIR": str(tmp_path / "jit")}
    done = run(RANK, environ, tmp_path, "9.0", "/nowhere")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"CUDA_HOME={Path(sys.prefix) / 'lib'}" in done.stdout
    assert list((tmp_path / "jit" / "sm90a").rglob("*.so")) != []


@pytest.mark.timeout(3 * COMPILE_S)
def test_an_engine_compiles_nothing_that_its_image_brings(tmp_path: Path) -> None:
    """Its part of the image is read-only; another generation of GPUs finds nothing that fits, and would compile."""
    environ, image, folder = launched(tmp_path), tmp_path / "image", tmp_path / "own"
    folder.mkdir()
    without_driver = {name: value for name, value in environ.items() if name != "LD_LIBRARY_PATH"}
    done = run(FILL, without_driver, image)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [kernel] = image.rglob("*fused_rope*.so")
    assert len(list(image.rglob("*.so"))) == 2
    for path in [*image.rglob("*"), image]:
        path.chmod(0o555)
    before = sorted(image.rglob("*"))
    # SGLang asks nvcc and c++ for their versions; it fails where it would have to call them for more.
    environ = {**environ, "SGLANG_CRASH_ON_JIT_COMPILE": "1"}
    found = run(RANK, environ, folder, "9.0", image)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    assert f"CACHE={folder / 'jit'}" in found.stdout
    assert sorted(image.rglob("*")) == before
    assert (folder / "jit" / kernel.relative_to(image)).resolve() == kernel
    other = run(RANK, environ, folder, "10.0", image)
    assert "has no usable cached build" in other.stderr, other.stderr[-3000:]


def test_the_environment_lacks_nothing_for_gpus_but_the_driver() -> None:
    known = facts()
    without = CudaFacts(torch="13.0")
    assert replace(known, driver="", driver_cuda=0) == without  # this machine may have one
    assert "libcuda.so.1" in unusable(without)
    found = compilers_here({"PATH": "/usr/bin"})
    assert found.missing == ()
