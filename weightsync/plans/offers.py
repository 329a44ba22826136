"""Chooses senders: distinct source boxes, the ranks that hold each, and equal shares of the bytes for these ranks."""

from dataclasses import dataclass, replace

import numpy as np

from weightsync.layouts.layout import Ids, Layout, ShardArray
from weightsync.plans.ops import OpArray, cut_rows, elements

BOX = ("tensor", "row", "rows", "col", "cols")


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Distinct source boxes, sorted by tensor.

    Attributes:
        boxes: one shard per distinct box.
        ranks: holders of all boxes, ascending within a box.
        first: [boxes] index in `ranks` of a box's first holder.
        count: [boxes] number of a box's holders.
        holder_set: [boxes] id of the set of holders; boxes with the same holders have the same id.
    """

    boxes: ShardArray
    ranks: Ids
    first: Ids
    count: Ids
    holder_set: Ids

    @classmethod
    def of(cls, shards: ShardArray) -> "Offers":
        """Group shards by box."""
        ordered = shards[np.lexsort([shards["rank"], *(shards[name] for name in reversed(BOX))])]
        first = _first_of_boxes(ordered)
        count = np.diff(np.append(first, len(ordered)))
        ranks = np.ascontiguousarray(ordered["rank"])
        # A set of ranks is identified by the sum of its members' 64-bit codes, which are drawn from a fixed seed.
        codes = np.random.default_rng(0).integers(0, 2**63, int(ranks.max()) + 1, dtype=np.uint64)
        sums = np.add.reduceat(codes[ranks], first) if len(first) > 0 else np.zeros(0, dtype=np.uint64)
        holder_set = np.unique(sums, return_inverse=True)[1].astype(np.int64)
        return cls(boxes=ordered[first], ranks=ranks, first=first, count=count, holder_set=holder_set)


def one_copy(source: Layout, near: int = -1) -> Layout:
    """Return a layout with one holder of each box, for readers of files, among which no load needs to be shared.

    Args:
        near: the rank that holds a box if it has a copy; of the others, and with -1, the first one does.
    """
    shards = source.shards[~source.shards["alias"]]
    far = shards["rank"] != near
    ordered = shards[np.lexsort([shards["rank"], far, *(shards[name] for name in reversed(BOX))])]
    return replace(source, shards=ordered[_first_of_boxes(ordered)])


def _first_of_boxes(ordered: ShardArray) -> Ids:
    """Return the indices at which another box begins, of shards in the order of their boxes."""
    change = np.zeros(len(ordered), dtype=bool)
    change[:1] = True
    for name in BOX:
        change[1:] |= ordered[name][1:] != ordered[name][:-1]
    return np.flatnonzero(change)


def share_load(ops: OpArray, offer: Ids, offers: Offers) -> OpArray:
    """Choose the sender of every op.

    The ops of a set of holders, in a row, are cut into as many equal shares as the set has members; an op across a cut
    is split by rows. So loads within a set differ by less than a row of a split op.

    Args:
        offer: [ops] index of each op's box.
    """
    order = np.lexsort((np.arange(len(ops)), offers.holder_set[offer]))
    ops, offer = ops[order], offer[order]
    size = elements(ops)
    holder_set = offers.holder_set[offer]
    start = np.cumsum(size) - size
    leader = (
        np.flatnonzero(np.append(True, holder_set[1:] != holder_set[:-1])) if len(ops) > 0 else np.zeros(0, np.int64)
    )
    length = np.diff(np.append(leader, len(ops)))
    start = start - np.repeat(start[leader], length)  # within the set
    total = np.repeat(np.add.reduceat(size, leader), length) if len(ops) > 0 else size
    members = offers.count[offer]
    share = total / members
    lowest = np.minimum((start / share).astype(np.int64), members - 1)
    highest = np.minimum(((start + size - 1) / share).astype(np.int64), members - 1)
    counts = highest - lowest + 1
    op = np.repeat(np.arange(len(ops)), counts)
    step = np.arange(len(op)) - np.repeat(np.cumsum(counts) - counts, counts)
    member = lowest[op] + step
    begins = np.rint((member * share[op] - start[op]) / ops["cols"][op]).astype(np.int64)
    begins = np.where(step == 0, 0, np.clip(begins, 0, ops["rows"][op]))
    pieces, kept = cut_rows(ops, counts, begins)
    pieces["src"] = offers.ranks[offers.first[offer[op[kept]]] + member[kept]]
    return pieces
