"""The transfer plan: source shards intersected with target shards, each target element exactly once."""

from dataclasses import dataclass

import numpy as np
import xxhash

from servicekit.errors import ConfigError, Internal
from weightsync.layouts.layout import Ids, Layout, ShardArray
from weightsync.plans.offers import Offers, share_load
from weightsync.plans.ops import OP_DTYPE, OpArray

PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Ops in their global order: by target rank, source rank, then tensor of the target."""

    source: Layout
    target: Layout
    ops: OpArray
    digest: str

    def elements_sent(self) -> Ids:
        """Count the elements that each source rank sends, [source ranks]."""
        sent = np.bincount(self.ops["src"], self.ops["rows"] * self.ops["cols"], minlength=self.source.num_ranks)
        return sent.astype(np.int64)

    def redundancy(self) -> float:
        """Compute elements moved / elements of the target's shards; 1.0 is the least possible."""
        moved = int((self.ops["rows"] * self.ops["cols"]).sum())
        return moved / sum(self.target.elements_of(rank) for rank in range(self.target.num_ranks))


def make_plan(source: Layout, target: Layout) -> TransferPlan:
    """Plan the transfer.

    Ranks with copies of a source slice (data parallelism) send equal shares of its bytes; see `offers.py`.

    Raises:
        ConfigError: a tensor is missing on one side, or has different shapes.
        Internal: an element of the target would be written never or twice.
    """
    translate = _match_tensors(source, target)
    wanted = target.shards.copy()
    wanted["tensor"] = translate[wanted["tensor"]]
    offers = Offers.of(source.shards[~source.shards["alias"]])
    ops, offer = _intersect(offers, wanted)
    ops = share_load(ops, offer, offers)
    ops = ops[np.lexsort((ops["dst_col"], ops["dst_row"], ops["dst_param"], ops["tensor"], ops["src"], ops["dst"]))]
    _check_exactly_once(ops, wanted, target)
    return TransferPlan(source=source, target=target, ops=ops, digest=_digest(source, target, ops))


def _match_tensors(source: Layout, target: Layout) -> Ids:
    """Map target tensor ids to source tensor ids."""
    ids = {name: i for i, name in enumerate(source.tensors)}
    missing = [name for name in target.tensors if name not in ids]
    extra = sorted(set(source.tensors) - set(target.tensors))
    if missing or extra:
        raise ConfigError(f"layouts differ: the source lacks {missing[:3]}, the target lacks {extra[:3]}")
    translate = np.array([ids[name] for name in target.tensors], dtype=np.int64)
    differing = np.flatnonzero((source.tensor_shapes[translate] != target.tensor_shapes).any(axis=1))
    if len(differing) > 0:
        first = differing[0]
        raise ConfigError(
            f"shape of {target.tensors[first]}: {source.tensor_shapes[translate[first]].tolist()} at the source, "
            f"{target.tensor_shapes[first].tolist()} at the target"
        )
    return translate


def _intersect(offers: Offers, wanted: ShardArray) -> tuple[OpArray, Ids]:
    """Intersect distinct source boxes with target boxes of the same tensor.

    Returns: ops without `src`, one per non-empty intersection; for each op the index of its source box.
    """
    boxes = offers.boxes
    begin = np.searchsorted(boxes["tensor"], wanted["tensor"], side="left")
    counts = np.searchsorted(boxes["tensor"], wanted["tensor"], side="right") - begin
    w = np.repeat(np.arange(len(wanted)), counts)
    s = np.arange(len(w)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begin, counts)
    row = np.maximum(boxes["row"][s], wanted["row"][w])
    col = np.maximum(boxes["col"][s], wanted["col"][w])
    rows = np.minimum((boxes["row"] + boxes["rows"])[s], (wanted["row"] + wanted["rows"])[w]) - row
    cols = np.minimum((boxes["col"] + boxes["cols"])[s], (wanted["col"] + wanted["cols"])[w]) - col
    keep = (rows > 0) & (cols > 0)
    s, w, row, col = s[keep], w[keep], row[keep], col[keep]
    ops = np.zeros(len(s), dtype=OP_DTYPE)
    ops["dst"], ops["tensor"] = wanted["rank"][w], wanted["tensor"][w]
    ops["rows"], ops["cols"] = rows[keep], cols[keep]
    for side, table, index in (("dst", wanted, w), ("src", boxes, s)):
        ops[f"{side}_param"] = table["param"][index]
        ops[f"{side}_row"] = row + (table["param_row"] - table["row"])[index]
        ops[f"{side}_col"] = col + (table["param_col"] - table["col"])[index]
    return ops, s


def _check_exactly_once(ops: OpArray, wanted: ShardArray, target: Layout) -> None:
    """Compare elements by (rank, parameter): as source boxes are disjoint, equal counts mean exactly once."""
    width = len(target.params)
    need = np.zeros(target.num_ranks * width, dtype=np.int64)
    got = np.zeros_like(need)
    np.add.at(need, wanted["rank"] * width + wanted["param"], wanted["rows"] * wanted["cols"])
    np.add.at(got, ops["dst"] * width + ops["dst_param"], ops["rows"] * ops["cols"])
    wrong = np.flatnonzero(need != got)
    if len(wrong) > 0:
        rank, param = divmod(int(wrong[0]), width)
        raise Internal(
            f"plan covers {int(got[wrong[0]])} of {int(need[wrong[0]])} elements "
            f"of {target.params[param]} on rank {rank}"
        )


def _digest(source: Layout, target: Layout, ops: OpArray) -> str:
    """Compute a digest, sensitive to order, of everything that both ends must agree on."""
    digest = xxhash.xxh3_128()
    for text in (f"tandem plan {PLAN_FORMAT}", *source.tensors, *source.params, *target.params):
        digest.update(text.encode() + b"\0")
    for layout in (source, target):
        digest.update(np.int64(layout.num_ranks).tobytes())
        digest.update(np.ascontiguousarray(layout.tensor_shapes).tobytes())
    digest.update(np.ascontiguousarray(ops).tobytes())
    return digest.hexdigest()
