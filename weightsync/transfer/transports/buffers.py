"""Buffers for bytes that cannot go from parameter to parameter: few, of one size, kept from round to round."""

import torch

from weightsync.plans.limits import number_of_buffers


class Buffers:
    """A pool of buffers: as many as two of the round's largest messages fill, and at least two.

    Attributes:
        peak_bytes: bytes of all buffers allocated so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0
        self._number = 0
        self._used = 0
        self._free: list[torch.Tensor] = []
        self.peak_bytes = 0

    def resize(self, size: int, largest_message: int) -> None:
        """Set the size to at least this many bytes; drop buffers of an older plan if too small or too many."""
        kept = max(size, self._size)
        if size > self._size or self.peak_bytes > number_of_buffers(kept, largest_message) * kept:
            self._size, self.peak_bytes = size, 0
            self._free.clear()
        self._number = number_of_buffers(self._size, largest_message)
        self._used = 0

    def are_left(self) -> bool:
        """Whether take() may be called."""
        return self._used < self._number

    def take(self) -> torch.Tensor:
        """Take a buffer; give() returns it."""
        self._used += 1
        if self._free:
            return self._free.pop()
        self.peak_bytes += self._size
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer."""
        self._used -= 1
        self._free.append(buffer)
