"""Run file I/O on some ranks and share success or failure with all: no rank waits for one that has failed."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from servicekit.errors import ConfigError, Internal


def together(what: str, device: torch.device, action: Callable[[], int] | None) -> int:
    """Run `action` on some ranks and share its success or failure; every rank must call this.

    Args:
        what: the work, for errors ("write checkpoint /a/b").
        action: this rank's part, or None. Its OSErrors and ConfigErrors are errors of the request, not of the trainer.
    Returns: the sum of all ranks' results, on every rank.
    Raises: Internal: on every rank, if any rank's part failed.
    """
    error: Exception | None = None
    result = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        result[0] = action() if action is not None else 0
    except (OSError, SafetensorError, ConfigError) as caught:
        error, result[1] = caught, 1
    dist.all_reduce(result)
    if error is not None:
        raise Internal(f"cannot {what}: {error}") from error
    if int(result[1]) > 0:
        raise Internal(f"cannot {what}: {int(result[1])} trainer ranks failed, their logs say why")
    return int(result[0])


def first_text(text: str, device: torch.device) -> str:
    """Share a text with all ranks; every rank must call this. Returns: that of the first rank whose text is not ""."""
    rank, content = dist.get_rank(), text.encode()
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    lengths[rank] = len(content)
    dist.all_reduce(lengths)
    found = [(first, length) for first, length in enumerate(map(int, lengths)) if length > 0]
    if not found:
        return ""
    first, length = found[0]
    shared = torch.zeros(length, dtype=torch.int64, device=device)
    if rank == first:
        shared.copy_(torch.tensor(list(content)))
    dist.all_reduce(shared)
    return bytes(shared.tolist()).decode()
