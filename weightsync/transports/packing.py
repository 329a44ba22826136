"""Packing: the ops of a message copied between a rank's parameters and one contiguous buffer."""

from collections.abc import Mapping
from typing import Literal

import torch

from servicekit.errors import Internal
from weightsync.layout import Layout
from weightsync.messages import Message


class Packer:
    """One side's view of its parameters.

    Args:
        layout: the layout that the message's parameter ids and offsets on this side refer to.
        tensors: parameter (or its staging copy) by name; contiguous, one dtype, one device.
        side: which end of the ops this rank is.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor], side: Literal["src", "dst"]) -> None:
        self._matrices = [_as_matrix(name, tensors[name]) if name in tensors else None for name in layout.params]
        self._side = side
        held = next(iter(tensors.values()))
        self.dtype = held.dtype
        self.device = held.device

    def payload_bytes(self, message: Message) -> int:
        """Size of the message's payload."""
        return message.elements * int(self.dtype.itemsize)

    def pack(self, message: Message, payload: torch.Tensor) -> None:
        """Parameters -> payload (uint8 [payload_bytes])."""
        for block, part in self._blocks(message, payload):
            part.copy_(block)

    def unpack(self, message: Message, payload: torch.Tensor) -> None:
        """Payload (uint8 [payload_bytes]) -> parameters."""
        for block, part in self._blocks(message, payload):
            block.copy_(part)

    def _blocks(self, message: Message, payload: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(block of a parameter [rows, cols], its place in the payload [rows, cols]) of each op."""
        flat = payload.view(self.dtype)
        ops = message.ops
        side = self._side
        columns = [ops[name].tolist() for name in (f"{side}_param", f"{side}_row", f"{side}_col", "rows", "cols")]
        pairs = []
        offset = 0
        for param, row, col, rows, cols in zip(*columns, strict=True):
            matrix = self._matrices[param]
            if matrix is None:
                raise Internal(f"message {message.sequence} names parameter {param}, which this rank does not have")
            pairs.append(
                (matrix[row : row + rows, col : col + cols], flat[offset : offset + rows * cols].view(rows, cols))
            )
            offset += rows * cols
        return pairs


def _as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[rows, cols] view without a gradient; a stack of matrices is one tall matrix, a vector one column."""
    if not tensor.is_contiguous():
        raise Internal(f"parameter {name} is not contiguous")
    data = tensor.detach()
    return data.view(-1, 1) if data.dim() == 1 else data.view(-1, data.shape[-1])
