"""What the ranks of a weight group must have in common: published when they join, compared before they connect.

| fact              | why ranks that differ must not meet                                                              |
|-------------------|--------------------------------------------------------------------------------------------------|
| tandem            | one release: the rounds' messages, headers and digests                                           |
| plan format       | both sides make the plan by themselves, and must get the same one                                |
| torch             | gloo's and the TCP store's own protocols, and CUDA's memory handles, are torch's (major.minor)   |
| C++ ABI           | of torch's build: the handles are structures of its C++ library                                  |
| byte order        | tensors travel as their bytes                                                                    |
| device            | NCCL needs a GPU on both sides; if one is on the CPU, the other waits for ever                   |
| NCCL              | one version: NCCL does not support mixed ones                                                    |
| NCCL_...          | settings that both ends of a connection use; where they differ, NCCL hangs or fails elsewhere    |
"""

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence

import torch

from servicekit.errors import ConfigError, SlotTaken, Unavailable
from servicekit.versions import software_versions
from weightsync.membership.nccl_settings import NCCL_SETTINGS
from weightsync.plans.plan import PLAN_FORMAT

_UNSET = "unset"


def own_facts(device: torch.device, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the facts of this process, by name."""
    facts = {
        "tandem": software_versions(["tandem"]).get("tandem", "not installed"),
        "plan format": str(PLAN_FORMAT),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "C++ ABI": str(int(torch.compiled_with_cxx11_abi())),
        "byte order": sys.byteorder,
        "device": device.type,
    }
    if device.type == "cuda":
        facts["NCCL"] = ".".join(map(str, nccl_version()))
        facts |= {name: environ.get(name, _UNSET) for name in NCCL_SETTINGS}
    return facts


def nccl_version() -> tuple[int, int, int]:
    """Ask the NCCL library that this process has loaded: torch.cuda.nccl.version is of the one torch was built with.

    That one is the answer where torch has NCCL within itself.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        failed = 1
    if failed:
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return major, minor, patch
    return version.value // 10_000, version.value // 100 % 100, version.value % 100


def check_facts(published: Mapping[str, str], slots: Sequence[str]) -> None:
    """Compare the slots' facts with those of the first one; all ranks get the same error.

    Args:
        published: facts as JSON, by slot.
    Raises: ConfigError: the slots that differ, the fact, and both values; Unavailable: a slot has published nothing, or
        what it had was lost; SlotTaken: the holder of a slot is not a rank.
    """
    first = _read(published, slots[0])
    differences: dict[tuple[str, str, str], list[str]] = {}
    for slot in slots[1:]:
        facts = _read(published, slot)
        for name in sorted(first.keys() | facts.keys()):
            mine, theirs = facts.get(name, "nothing"), first.get(name, "nothing")
            if mine != theirs:
                differences.setdefault((name, mine, theirs), []).append(slot)
    if differences:
        raise ConfigError("; ".join(_sentence(slots[0], *key, who) for key, who in differences.items()))


def _sentence(first: str, name: str, mine: str, theirs: str, who: Sequence[str]) -> str:
    more = f" and {len(who) - 3} more" if len(who) > 3 else ""
    where = "set the same in both" if name.startswith("NCCL_") else "use images of the same release"
    return f"{name} must match: {', '.join(who[:3])}{more} has {mine}, {first} has {theirs} ({where})"


def _read(published: Mapping[str, str], slot: str) -> dict[str, str]:
    if slot not in published:
        raise Unavailable(f"{slot} does not say what it runs; its rank tells it again within a lease's time")
    facts = dict(json.loads(published[slot]))
    if not facts:
        raise SlotTaken(f"{slot} is held by a process that is not a rank: it has published no facts")
    return facts
