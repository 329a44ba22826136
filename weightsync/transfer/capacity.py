"""The memory that a process can still allocate, checked in PREPARE before a spare shard."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers see their own
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the GPU, or of the host within this container's limit.

    Caches count as free. Another process may take the memory a moment later: nothing is reserved.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own cache
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return int(min(_of_host(_MEMINFO), _of_container(_CGROUP)))


def _of_host(meminfo: Path) -> int:
    lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _of_container(cgroup: Path) -> float:
    """Return the free bytes within the container's limit; infinite without a limit or a cgroup."""
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return float("inf")
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except FileNotFoundError:
        return float("inf")
