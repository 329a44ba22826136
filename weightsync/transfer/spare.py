"""The spare shard of staged rounds: filled while the engine generates, then exchanged with the served one.

PREPARE checks that the process can still allocate the memory for it.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from servicekit.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers see their own
_MEMINFO = Path("/proc/meminfo")


class SpareShard:
    """Memory for a second shard, allocated at the first use and kept: fresh memory costs a page fault per 4 KiB.

    Args:
        served: the engine's own tensors, by name. `install` exchanges the memory of a tensor on a CPU to which nothing
            else refers now; for any other it copies the bytes (a view that the engine keeps would go stale, a CUDA
            graph holds addresses).
    """

    def __init__(self, served: Mapping[str, torch.Tensor]) -> None:
        self._served = served
        self._movable = _movable(served)
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a staged round fills. After `install` they hold the version that was served before."""
        if not self._tensors:
            self._make()
        return self._tensors

    def reserve(self, slot: str) -> None:
        """Allocate the memory before the round relies on it.

        Raises: ConfigError: there is no room for it next to the served shard.
        """
        if self._tensors:
            return
        needed = sum(tensor.numel() * tensor.element_size() for tensor in self._served.values())
        device = next(iter(self._served.values())).device
        free = free_bytes(device)
        if needed > free or not self._allocate():
            raise ConfigError(
                f"{slot}: no room for the spare shard of a staged round: it takes {needed / 2**30:.2f} GiB, "
                f"{device.type} memory has {free / 2**30:.2f} GiB free; use sync.install: in_place, which needs none"
            )

    def _allocate(self) -> bool:
        """Allocate it. Returns: whether there was room: free memory may be in pieces that are too small."""
        try:
            self._make()
        except torch.OutOfMemoryError:
            return False
        return True

    def _make(self) -> None:
        self._tensors = {name: torch.empty_like(tensor.detach()) for name, tensor in self._served.items()}

    def install(self) -> None:
        """Move the staged version into the served tensors, which nothing may read meanwhile."""
        for name, staged in self.tensors.items():
            served = self._served[name]
            if name in self._movable:
                served.data, staged.data = staged.data, served.data
            else:
                served.detach().copy_(staged)


def _movable(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of CPU tensors to whose memory nothing else refers."""
    on_cpu = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    return frozenset(name for name, tensor in on_cpu.items() if _references(tensor) == 1)


def _references(tensor: torch.Tensor) -> int:
    """Count the tensors on the tensor's memory, in Python or not."""
    storage = tensor.untyped_storage()  # itself a reference
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


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
