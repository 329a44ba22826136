"""Cuts a plan into messages, and routes them along the chain of replicas.

Every rank processes its messages in the order of (sequence, hop). The order is total, so both ends of the oldest
unfinished message are always ready, and ranks cannot wait for each other in a circle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plans.ops import OpArray, cut_rows, elements
from weightsync.plans.plan import TransferPlan


@dataclass(frozen=True, kw_only=True)
class Message:
    """Ops from one trainer rank to one rollout rank whose elements are sent together.

    Attributes:
        sequence: number in the plan, from 0.
        src: rank of the source layout.
        dst: rank of the target layout.
        elements: number of elements of all ops.
    """

    sequence: int
    src: int
    dst: int
    ops: OpArray
    elements: int


def cut_messages(plan: TransferPlan, max_elements: int) -> list[Message]:
    """Cut a plan into messages of at most max_elements (at least one row each), round-robin over rank pairs."""
    ops = plan.ops
    pairs = ops["dst"] * plan.source.num_ranks + ops["src"]
    bounds = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]])) if len(ops) > 0 else np.array([], int)
    keyed = [
        (index, pair, chunk)
        for pair in np.split(ops, bounds[1:])
        for index, chunk in enumerate(_chunks(pair, max_elements))
    ]
    keyed.sort(key=lambda item: (item[0], int(item[1]["dst"][0]), int(item[1]["src"][0])))
    return [
        Message(
            sequence=sequence,
            src=int(chunk["src"][0]),
            dst=int(chunk["dst"][0]),
            ops=chunk,
            elements=int((chunk["rows"] * chunk["cols"]).sum()),
        )
        for sequence, (_, _, chunk) in enumerate(keyed)
    ]


def _chunks(ops: OpArray, max_elements: int) -> Iterator[OpArray]:
    """Split ops that are too large by rows, then fill chunks in order."""
    pieces = _split_rows(ops, max_elements)
    ends = np.cumsum(elements(pieces))
    start = 0
    while start < len(pieces):
        filled = ends[start - 1] if start > 0 else 0
        stop = max(start + 1, int(np.searchsorted(ends, filled + max_elements, side="right")))
        yield pieces[start:stop]
        start = stop


def _split_rows(ops: OpArray, max_elements: int) -> OpArray:
    rows_per_piece = np.maximum(1, max_elements // ops["cols"])
    counts = -(-ops["rows"] // rows_per_piece)
    if (counts == 1).all():
        return ops
    op = np.repeat(np.arange(len(ops)), counts)
    step = np.arange(len(op)) - np.repeat(np.cumsum(counts) - counts, counts)
    return cut_rows(ops, counts, step * rows_per_piece[op])[0]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A message on one link: hop 0 is trainer -> first replica, hop h is replica h - 1 -> replica h.

    Attributes:
        sender: rank of the communicator.
        receiver: rank of the communicator.
    """

    message: Message
    hop: int
    sender: int
    receiver: int


def route(
    messages: Sequence[Message], trainer_ranks: int, first_rank_by_replica: Sequence[int], rank: int | None = None
) -> list[Hop]:
    """List the hops in which communicator rank `rank` takes part, in the order in which it must process them.

    Args:
        trainer_ranks: number of trainer ranks, which come first in the communicator.
        first_rank_by_replica: communicator rank of TP rank 0 of each replica of this layout, in chain order.
        rank: None: the hops of all ranks.
    """
    hops = []
    for message in messages:
        sender = message.src
        for hop, first in enumerate(first_rank_by_replica):
            receiver = first + message.dst
            if rank is None or rank in (sender, receiver):
                hops.append(Hop(message=message, hop=hop, sender=sender, receiver=receiver))
            sender = receiver
    return hops


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two ranks of the communicator between which messages of one hop are sent, in one direction."""

    hop: int
    sender: int
    receiver: int


def links_of(hops: Iterable[Hop], ranks: int) -> list[Link]:
    """List the links of hops, in an order that is the same on every rank.

    The order is total: ranks that connect their links one by one, each waiting for the other end, cannot wait in a
    circle. Neighbours in it have few ranks in common, so that most links are connected concurrently: links from the
    trainer come first, sorted by distance; of a chain, every second link before the others.

    Args:
        ranks: size of the communicator.
    """

    def place(link: Link) -> tuple[bool, int, int, int]:
        return link.hop > 0, link.hop % 2, (link.receiver - link.sender) % ranks, link.sender

    return sorted({Link(hop=hop.hop, sender=hop.sender, receiver=hop.receiver) for hop in hops}, key=place)
