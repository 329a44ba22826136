"""Agree over gloo on what ranks do alone, such as file I/O: no rank waits for one that has failed.

Collectives of device groups are for the device's work: NCCL counts trainer.collective_timeout_s from the moment that
the first rank calls one, and then ends its process.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from servicekit.errors import ConfigError, Internal

# As the longest deadline of calls that read or write (protos/tandem_api/trainer/v1/trainer.proto).
WAIT_S = 1800.0


class RankAgreement:
    """What ranks agree on; every rank must call each method.

    Attributes:
        group: of all ranks, over gloo, which waits for WAIT_S (build.outcome_group).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def meet(self) -> None:
        """Wait for all ranks: between work of each rank's own and a collective of a device group."""
        dist.barrier(group=self.group)

    def together(self, what: str, action: Callable[[], int] | None) -> int:
        """Run `action` on some ranks and share its success or failure.

        Args:
            what: the work, for errors ("write checkpoint /a/b").
            action: this rank's part, or None. Its OSErrors and ConfigErrors are errors of the request, not of the
                trainer.
        Returns: the sum of all ranks' results, on every rank.
        Raises: Internal: on every rank, if any rank's part failed.
        """
        error: Exception | None = None
        result = torch.zeros(2, dtype=torch.int64)
        try:
            result[0] = action() if action is not None else 0
        except (OSError, SafetensorError, ConfigError) as caught:
            error, result[1] = caught, 1
        dist.all_reduce(result, group=self.group)
        if error is not None:
            raise Internal(f"cannot {what}: {error}") from error
        if int(result[1]) > 0:
            raise Internal(f"cannot {what}: {int(result[1])} trainer ranks failed, their logs say why")
        return int(result[0])

    def first_text(self, text: str) -> str:
        """Share a text. Returns: that of the first rank whose text is not ""."""
        rank, content = dist.get_rank(), text.encode()
        lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        lengths[rank] = len(content)
        dist.all_reduce(lengths, group=self.group)
        found = [(first, length) for first, length in enumerate(map(int, lengths)) if length > 0]
        if not found:
            return ""
        first, length = found[0]
        shared = torch.zeros(length, dtype=torch.int64)
        if rank == first:
            shared.copy_(torch.tensor(list(content)))
        dist.all_reduce(shared, group=self.group)
        return bytes(shared.tolist()).decode()
