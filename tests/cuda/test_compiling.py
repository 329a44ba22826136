"""SGLang compiles at run time in exactly the environment that `tandem run` and `engine_environment` make.

On a machine with a driver and no toolkit, by a python whose environment is not activated. A compilation needs no GPU.
"""

import os
import subprocess
import sys
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
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.options import engine_environment
from tandem_config.loading import load_config
config = load_config(None, ["model.path=m", "data.train=t.jsonl"])
os.environ.update(engine_environment(config, HostRanks(), "127.0.0.1", Path(sys.argv[1]), True))
print(f"CUDA_HOME={os.environ['CUDA_HOME']}")
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


def driver_only(tmp_path: Path) -> dict[str, str]:
    """A shell's environment where nothing is activated and no toolkit is on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "g++", "gcc", "c++", "cc", "as", "ld", "cat", "rm", "mv", "uname"):
        (programs / name).symlink_to(Path("/usr/bin") / name)
    left_out = ("CUDA_HOME", "CUDA_PATH", "LIBRARY_PATH", "PATH")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"PATH": str(programs)}


@pytest.mark.timeout(2 * COMPILE_S)
def test_rope_compiles_and_links_without_a_toolkit(tmp_path: Path) -> None:
    config = load_config(None, ["model.path=m", "data.train=t.jsonl"])
    launch = Launch(
        run_id="r", run_dir=tmp_path, config_file=tmp_path / "c", redis_url="unix:///r", resume=False, token="t"
    )
    rollout = next(
        spec for spec in plan_processes(config, launch, plan_devices(config, ["0", "1"])) if "rollout" in spec.name
    )
    environ = {**driver_only(tmp_path), **rollout.env, "SGLANG_JIT_CACHE_DIR": str(tmp_path / "jit")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path), "9.0"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"CUDA_HOME={Path(sys.prefix) / 'lib'}" in done.stdout
    assert list((tmp_path / "jit" / "sm90a").rglob("*.so")) != []


def test_the_environment_lacks_nothing_for_gpus_but_the_driver() -> None:
    known = facts()
    assert known == CudaFacts(torch="13.0", driver=known.driver, driver_cuda=0)
    assert "libcuda.so.1" in unusable(known)
    found = compilers_here({"PATH": "/usr/bin"})
    assert found.missing == ()
