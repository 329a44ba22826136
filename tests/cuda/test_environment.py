"""The environment is its lock, every module of the services imports in it, and NCCL is there as far as one can see."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from tests.house.repository import PACKAGES, REPO
from tools.check_venv import damaged, read_pins, site_packages, wrong_packages
from weightsync.transfer.communicators.communicator import form

LOCK = REPO / "requirements" / f"cuda-{sys.version_info.major}.{sys.version_info.minor}.txt"
# SGLang imports for half a minute on an idle machine.
IMPORT_S = 600.0
# A process per service, as in operation. Each module whose import fails is named.
IMPORT_ALL = """
import importlib, pkgutil, sys, traceback
package = importlib.import_module(sys.argv[1])
failed = []
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if found.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except BaseException:
        failed.append(f"{found.name}: {traceback.format_exc(limit=-3)}")
print("\\n".join(failed))
"""


def test_it_is_as_locked() -> None:
    assert wrong_packages(read_pins(LOCK)) == []
    assert damaged(site_packages()) == {}


def test_torch_is_the_cuda_build_that_sglang_asks_for() -> None:
    assert torch.version.cuda is not None
    assert f"torch=={metadata.version('torch').partition('+')[0]}" in (metadata.requires("sglang") or [])
    assert not torch.cuda.is_available(), "this is for machines without a GPU; `make gpu-check` is for the others"


@pytest.mark.timeout(2 * IMPORT_S)
def test_sglang_own_kernels_load() -> None:
    """They are linked to the driver's library."""
    done = subprocess.run(
        [sys.executable, "-c", "import sgl_kernel"], capture_output=True, text=True, timeout=IMPORT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(2 * IMPORT_S)
@pytest.mark.parametrize("package", [*PACKAGES, "tandem_api"])
def test_every_module_of_the_services_imports(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, package],
        cwd=REPO,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == ""


def test_a_group_on_gpus_is_built_up_to_the_gpu() -> None:
    """As ranks build it, with a group of one: NCCL's part refuses for want of a GPU and of nothing else."""
    with pytest.raises((ValueError, RuntimeError), match="no GPUs found"):
        form(
            dist.HashStore(),
            name="trial",
            rank=0,
            slots=["trainer/0"],
            host="127.0.0.1",
            device=torch.device("cuda", 0),
            timeout_s=20.0,
        )


def test_nccl_is_the_one_that_torch_was_built_with() -> None:
    """Its functions come from the wheel nvidia-nccl-cu13, which the lock pins."""
    locked = read_pins(LOCK)["nvidia-nccl-cu13"]
    assert ".".join(str(part) for part in torch.cuda.nccl.version()) == locked
