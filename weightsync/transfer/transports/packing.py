"""Packing: copy a message's ops between a rank's parameters and contiguous bytes, or lend the bytes without a copy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from servicekit.errors import Internal
from weightsync.layouts.layout import Layout
from weightsync.plans.limits import SEGMENT_BYTES
from weightsync.plans.messages import Message

# Payloads that are hashed without a buffer are copied in pieces that stay in a core's cache until they are hashed.
PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Block:
    """One op on this side.

    Attributes:
        values: a block of a parameter [rows, cols].
        start: its first element within its segment.
        lent: the block's own bytes (uint8), where it is contiguous and of the wire type.
    """

    values: torch.Tensor
    start: int
    elements: int
    lent: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a message's payload that travels as one piece; both ends cut a message alike.

    Attributes:
        lent: the parameter's own bytes (uint8), where the run is one contiguous block of it in the wire type.
    """

    num_bytes: int
    blocks: tuple[Block, ...]
    lent: torch.Tensor | None


class Packer:
    """One side's view of its parameters. It caches the segments of each message.

    Args:
        layout: the layout that the message's parameter ids and offsets on this side refer to.
        tensors: parameter (or its staging copy) by name; contiguous, one dtype, one device.
        side: which end of the ops this rank is.
        dtype: type of the payload; None: the parameters' own. Packing and unpacking cast.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        side: Literal["src", "dst"],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._matrices = [as_matrix(name, tensors[name]) if name in tensors else None for name in layout.params]
        self._names = layout.params
        self._side = side
        held = next(iter(tensors.values()))
        self.dtype = dtype if dtype is not None else held.dtype
        self.device = held.device
        self._scratch: torch.Tensor | None = None
        # By id(); the message is kept, so that no other object gets its id.
        self._known: dict[int, tuple[Message, tuple[Segment, ...]]] = {}

    @property
    def matrices(self) -> dict[str, torch.Tensor]:
        """Every parameter as a matrix [rows, cols], by name."""
        return {name: m for name, m in zip(self._names, self._matrices, strict=True) if m is not None}

    def payload_bytes(self, message: Message) -> int:
        """Return the size of the message's payload."""
        return message.elements * int(self.dtype.itemsize)

    def staged_bytes(self, message: Message) -> int:
        """Return the size of the segments that need a buffer."""
        return sum(segment.num_bytes for segment in self.segments(message) if segment.lent is None)

    def segments(self, message: Message) -> tuple[Segment, ...]:
        """Cut the message's payload into segments."""
        known = self._known.get(id(message))
        if known is None:
            known = (message, tuple(self._cut(message)))
            self._known[id(message)] = known
        return known[1]

    def forget(self) -> None:
        """Drop the segments of an old plan's messages."""
        self._known.clear()

    def pack(self, message: Message, payload: torch.Tensor) -> None:
        """Copy parameters into a payload (uint8 [payload_bytes])."""
        for segment, part in self._parts(message, payload):
            self.pack_segment(segment, part)

    def unpack(self, message: Message, payload: torch.Tensor) -> None:
        """Copy a payload (uint8 [payload_bytes]) into parameters."""
        for segment, part in self._parts(message, payload):
            self.unpack_segment(segment, part)

    def pack_segment(self, segment: Segment, part: torch.Tensor) -> None:
        """Copy parameters into a segment's bytes (uint8 [num_bytes])."""
        for values, piece in self._pairs(segment, part):
            piece.copy_(values)

    def unpack_segment(self, segment: Segment, part: torch.Tensor) -> None:
        """Copy a segment's bytes (uint8 [num_bytes]) into parameters."""
        for values, piece in self._pairs(segment, part):
            values.copy_(piece)

    def split(self, message: Message, payload: torch.Tensor) -> list[torch.Tensor]:
        """Split a payload into its segments, from which the digest is computed."""
        return [part for _, part in self._parts(message, payload)]

    def stored(self, message: Message) -> Iterator[torch.Tensor]:
        """Yield the payload's bytes as the parameters hold them now; a piece is valid until the next one."""
        for segment in self.segments(message):
            if segment.lent is not None:
                yield segment.lent
            elif self.device.type == "cpu":
                yield from self._pieces(segment)
            else:  # a digest on GPUs depends on the parts: use those that the sender hashed
                part = torch.empty(segment.num_bytes, dtype=torch.uint8, device=self.device)
                self.pack_segment(segment, part)
                yield part

    def _pieces(self, segment: Segment) -> Iterator[torch.Tensor]:
        for block in segment.blocks:
            if block.lent is not None:
                yield block.lent
                continue
            cols = block.values.shape[1]
            for rows in block.values.split(max(1, PIECE_BYTES // self.dtype.itemsize // cols)):
                piece = self._piece(rows.numel())
                piece.view(rows.shape).copy_(rows)
                yield piece.view(torch.uint8)

    def _piece(self, elements: int) -> torch.Tensor:
        """Return scratch memory, reused by every call: fresh memory costs a page fault per 4 KiB."""
        if self._scratch is None or self._scratch.numel() < elements:
            self._scratch = torch.empty(max(elements, PIECE_BYTES // self.dtype.itemsize), dtype=self.dtype)
        return self._scratch[:elements]

    def _parts(self, message: Message, payload: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
        begin = 0
        for segment in self.segments(message):
            yield segment, payload[begin : begin + segment.num_bytes]
            begin += segment.num_bytes

    def _pairs(self, segment: Segment, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        flat = part.view(self.dtype)
        for block in segment.blocks:
            piece = flat[block.start : block.start + block.elements]
            yield block.values, piece.view(block.values.shape)

    def _cut(self, message: Message) -> Iterator[Segment]:
        """Cut a message into segments: small ops share one, a large op has its own."""
        run: list[Block] = []
        filled = 0
        least = SEGMENT_BYTES[self.device.type] // self.dtype.itemsize
        for values in self.blocks(message):
            elements = values.numel()
            if run and (elements >= least or run[0].elements >= least):
                yield self._segment(run)
                run, filled = [], 0
            run.append(Block(values, filled, elements, self._lent(values)))
            filled += elements
        if run:
            yield self._segment(run)

    def _segment(self, run: list[Block]) -> Segment:
        lent = run[0].lent if len(run) == 1 else None
        return Segment(sum(block.elements for block in run) * int(self.dtype.itemsize), tuple(run), lent)

    def _lent(self, values: torch.Tensor) -> torch.Tensor | None:
        if values.dtype != self.dtype or not values.is_contiguous():
            return None
        return values.view(-1).view(torch.uint8)

    def blocks(self, message: Message) -> Iterator[torch.Tensor]:
        """Yield the block [rows, cols] of a parameter for each op."""
        ops, side = message.ops, self._side
        columns = [ops[name].tolist() for name in (f"{side}_param", f"{side}_row", f"{side}_col", "rows", "cols")]
        for param, row, col, rows, cols in zip(*columns, strict=True):
            matrix = self._matrices[param]
            if matrix is None:
                raise Internal(f"message {message.sequence} names parameter {param}, which this rank does not have")
            yield matrix[row : row + rows, col : col + cols]


def as_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as [rows, cols] without a gradient: a stack of matrices is one tall matrix, a vector one column."""
    if not tensor.is_contiguous():
        raise Internal(f"parameter {name} is not contiguous")
    data = tensor.detach()
    return data.view(-1, 1) if data.dim() == 1 else data.view(-1, data.shape[-1])


class Packers:
    """The packers of a rank's memories, made again only where a tensor has moved."""

    def __init__(self, layout: Layout, side: Literal["src", "dst"]) -> None:
        self._layout = layout
        self._side: Literal["src", "dst"] = side
        self._made: dict[int, tuple[object, Packer]] = {}

    def get(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Packer:
        """Return the packer of these tensors for a payload of this type (None: their own)."""
        held = next(iter(tensors.values()))
        key = (dtype or held.dtype, [(tensor.data_ptr(), tensor.dtype) for tensor in tensors.values()])
        made = self._made.get(id(tensors))
        if made is None or made[0] != key:
            made = (key, Packer(self._layout, tensors, self._side, dtype))
            self._made[id(tensors)] = made
        return made[1]

    def exchange(self, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
        """Exchange the packers of two sets of tensors that have exchanged their memory."""
        for ours, theirs in ((one, self._made.pop(id(other), None)), (other, self._made.pop(id(one), None))):
            if theirs is not None:
                self._made[id(ours)] = theirs

    def forget(self) -> None:
        """Drop the segments of an old plan's messages in all packers."""
        for _, packer in self._made.values():
            packer.forget()
