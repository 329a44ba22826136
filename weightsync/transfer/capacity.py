"""How much memory a process may still take: what PREPARE asks before it promises room for a spare shard."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers see their own
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be had now: of the GPU, or of the host within this container's limit.

    Caches count as free. Others may take the memory a moment later: this finds what cannot be, it reserves nothing.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own cache
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return int(min(_of_host(_MEMINFO), _of_container(_CGROUP)))


def _of_host(meminfo: Path) -> int:
    lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _of_container(cgroup: Path) -> float:
    """Infinite without a limit, or where there is no cgroup to ask."""
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return float("inf")
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except FileNotFoundError:
        return float("inf")
