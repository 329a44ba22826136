"""A plan cut into messages: bounded, sequenced, and passed on along the chain of replicas.

Every process walks its messages in the order of (sequence, hop). The order is total, so the oldest unfinished message
always has both its ends ready and no set of processes can wait for each other in a circle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plans.ops import OpArray, cut_rows, elements
from weightsync.plans.plan import TransferPlan


@dataclass(frozen=True, kw_only=True)
class Message:
    """Ops from one trainer rank to one rollout rank whose elements travel as one buffer.

    src is a rank of the source layout, dst of the target layout. sequence numbers the messages of a plan from 0.
    """

    sequence: int
    src: int
    dst: int
    ops: OpArray
    elements: int


def cut_messages(plan: TransferPlan, max_elements: int) -> list[Message]:
    """Cuts a plan into messages of at most max_elements (at least one row each), round-robin over rank pairs."""
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
    """Splits ops that are too large by rows, then fills chunks in order."""
    pieces = _split_rows(ops, max_elements)
    ends = np.cumsum(elements(pieces))
    start = 0
    while start < len(pieces):
        filled = ends[start - 1] if start > 0 else 0
        stop = max(start + 1, int(np.searchsorted(ends, filled + max_elements, side="right")))
        yield pieces[start:stop]
        start = stop


def _split_rows(ops: OpArray, max_elements: int) -> OpArray:
    rows_each = np.maximum(1, max_elements // ops["cols"])
    counts = -(-ops["rows"] // rows_each)
    if (counts == 1).all():
        return ops
    op = np.repeat(np.arange(len(ops)), counts)
    step = np.arange(len(op)) - np.repeat(np.cumsum(counts) - counts, counts)
    return cut_rows(ops, counts, step * rows_each[op])[0]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One message on one link: hop 0 is trainer -> first replica, hop h is replica h - 1 -> replica h.

    sender and receiver are ranks of the communicator.
    """

    message: Message
    hop: int
    sender: int
    receiver: int


def route(
    messages: Sequence[Message], trainer_ranks: int, first_rank_by_replica: Sequence[int], rank: int
) -> list[Hop]:
    """The hops in which communicator rank `rank` takes part, in the order in which it must walk them.

    Args:
        trainer_ranks: the trainer's ranks come first in the communicator.
        first_rank_by_replica: communicator rank of TP rank 0 of each replica of this layout, in chain order.
    """
    hops = []
    for message in messages:
        sender = message.src
        for hop, first in enumerate(first_rank_by_replica):
            receiver = first + message.dst
            if rank in (sender, receiver):
                hops.append(Hop(message=message, hop=hop, sender=sender, receiver=receiver))
            sender = receiver
    return hops


@dataclass(frozen=True, kw_only=True)
class Link:
    """Two ranks of the communicator between which messages of one hop go, one way."""

    hop: int
    sender: int
    receiver: int


def links_of(hops: Iterable[Hop], ranks: int) -> list[Link]:
    """The links among hops, in an order that is the same on every rank of a communicator of so many ranks.

    The order is total: ranks that walk their links one by one, each waiting for the other end, cannot wait in a circle.
    Neighbours in it have few ranks in common, so that most links are walked at the same time: those from the trainer
    come first, sorted by distance; of a chain, every other link before those between them.
    """

    def place(link: Link) -> tuple[bool, int, int, int]:
        return link.hop > 0, link.hop % 2, (link.receiver - link.sender) % ranks, link.sender

    return sorted({Link(hop=hop.hop, sender=hop.sender, receiver=hop.receiver) for hop in hops}, key=place)
