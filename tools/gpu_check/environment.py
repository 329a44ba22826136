"""Describes the machine of a gpu-check: packages, devices, their links, and the variables that NCCL reads."""

import os
import re
import shutil
import subprocess
from typing import Any

from servicekit.cuda import compilers_here
from servicekit.versions import software_versions

PACKAGES = ("torch", "sglang", "sglang-kernel", "megatron-core", "transformer-engine", "triton", "flashinfer-python")
TOPOLOGY_S = 30.0
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def environment() -> dict[str, Any]:
    """Collect the environment for the report; without GPUs only the packages."""
    import torch

    from weightsync.transfer.facts import nccl_version

    if not torch.cuda.is_available():
        return {"packages": dict(software_versions(PACKAGES)), "devices": []}
    found = compilers_here()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "packages": dict(software_versions(PACKAGES)),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())),
        "devices": [
            {
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "memory_gib": round(device.total_memory / 2**30, 1),
            }
            for device in devices
        ],
        "driver_and_links": _ask_driver(),
        "compilers": {"toolkit": str(found.toolkit), "missing": found.missing, "ignored": found.ignored},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_"))},
    }


def _ask_driver() -> list[str]:
    """Ask nvidia-smi for the driver's version and the topology; no lines if it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    lines = []
    for question in (["--query-gpu=driver_version", "--format=csv,noheader"], ["topo", "-m"]):
        done = subprocess.run([program, *question], capture_output=True, text=True, timeout=TOPOLOGY_S, check=False)
        lines += _STYLES.sub("", done.stdout).splitlines()
    return lines
