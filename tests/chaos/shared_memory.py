"""Memory of colocated weight sync that a process holds, as the kernel lists it.

torch names a region /dev/shm/torch_<pid of its owner>_... and unlinks it at once; ours are memfd:tandem-weights.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_REGION = re.compile(r"(?:/dev/shm/torch_(\d+)_|/memfd:tandem-weights)")


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Open descriptors and mappings of shared regions. owners: pids of the trainer ranks that the mappings are of."""

    descriptors: int
    mappings: int
    owners: frozenset[int]


def shared_memory(pid: int) -> SharedMemory:
    """What a process that lives holds now."""
    links = [_target(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    found = [match for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if (match := _REGION.search(line))]
    return SharedMemory(
        descriptors=sum(_REGION.search(link) is not None for link in links),
        mappings=len(found),
        owners=frozenset(int(match[1]) for match in found if match[1]),
    )


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # closed since it was listed
        return ""


def files_of(pids: Iterable[int]) -> list[str]:
    """Files in /dev/shm that processes of these ids have made."""
    ours = {f"torch_{pid}" for pid in pids}
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.rpartition("_")[0].rpartition("_")[0] in ours]
