"""The cost of a round: sizes of a plan's messages, speeds of the machines, and the seconds that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weightsync.layouts.layout import Ids, Layout
from weightsync.plans.limits import RECEIVES, SEGMENT_BYTES, SENDS, number_of_buffers
from weightsync.plans.messages import Message
from weightsync.plans.ops import OP_DTYPE, OpArray, elements
from weightsync.plans.plan import TransferPlan
from weightsync.round.phases import calls_of

GIGABIT = 1e9 / 8  # bytes
Seconds = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of the machines; bytes and seconds. The defaults are round numbers for one 400 Gbit/s port per GPU.

    Attributes:
        trainer_link: a trainer rank's link in each direction, in bytes/s.
        rollout_link: a rollout rank's link in each direction, in bytes/s.
        latency_s: from both ends ready to the first byte.
        rpc_s: one call of a phase with its reply.
        copy: packing and unpacking of what needs a buffer, in bytes/s.
        digest: digest of a payload, in bytes/s.
        op_s: per block that is copied.
        segment_s: core time per segment of a message, at each end.
        cores: cores that all ranks of a host share; None: every rank has its own.
        link_cores: cores that a message in flight keeps busy, if the link is the host's memory.
    """

    trainer_link: float = 400 * GIGABIT
    rollout_link: float = 400 * GIGABIT
    latency_s: float = 20e-6
    rpc_s: float = 1e-3
    copy: float = 500e9
    digest: float = 100e9
    op_s: float = 5e-6
    segment_s: float = 10e-6
    cores: float | None = None
    link_cores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """Columns of a plan's messages, [messages] each.

    Attributes:
        segments: segments of a message, as `transports/packing.py` cuts it.
        staged_src, staged_dst: bytes that go through a buffer at that end, because they are not one block of memory.
        staged_src_ops, staged_dst_ops: ops of these bytes.
    """

    src: Ids
    dst: Ids
    num_bytes: Ids
    segments: Ids
    staged_src: Ids
    staged_src_ops: Ids
    staged_dst: Ids
    staged_dst_ops: Ids

    @classmethod
    def of(
        cls, plan: TransferPlan, messages: Sequence[Message], dtype_bytes: int, device: str = "cuda"
    ) -> "MessageSizes":
        """Cut messages into segments as `transports/packing.py` does: large ops alone, small neighbours together.

        Args:
            dtype_bytes: size of an element.
            device: of the parameters at both ends, "cpu" or "cuda".
        """
        ops = np.concatenate([m.ops for m in messages]) if messages else np.zeros(0, OP_DTYPE)
        counts = np.array([len(m.ops) for m in messages], dtype=np.int64)
        first = np.cumsum(counts) - counts
        size = elements(ops) * dtype_bytes
        large = size >= SEGMENT_BYTES[device]
        begins = large.copy()
        begins[1:] |= large[:-1]
        begins[first] = True
        alone = begins & np.append(begins[1:], True)
        columns: dict[str, Ids] = {"num_bytes": _sums(size, first), "segments": _sums(begins, first)}
        for side, layout in (("src", plan.source), ("dst", plan.target)):
            staged = ~(alone & _is_one_block(ops, side, layout))  # type: ignore[arg-type]
            columns[f"staged_{side}"] = _sums(size * staged, first)
            columns[f"staged_{side}_ops"] = _sums(staged, first)
            columns[side] = ops[side][first]
        return cls(**columns)

    def pack_s(self, speeds: Speeds) -> Seconds:
        """Return the sender's seconds before a message is sent, [messages]."""
        seconds: Seconds = (
            self.staged_src / speeds.copy + self.staged_src_ops * speeds.op_s + self.segments * speeds.segment_s
        )
        return seconds

    def unpack_s(self, speeds: Speeds) -> Seconds:
        """Return the receiver's seconds to unpack a message, [messages]."""
        seconds: Seconds = (
            self.staged_dst / speeds.copy + self.staged_dst_ops * speeds.op_s + self.segments * speeds.segment_s
        )
        return seconds

    def relay_s(self, speeds: Speeds) -> Seconds:
        """Return a relay's core seconds to forward a message, [messages]."""
        return self.segments * speeds.segment_s

    def digest_s(self, speeds: Speeds) -> Seconds:
        """Return the seconds of a digest, [messages]: at the sender, at a relay, and in VERIFY at the receiver."""
        return self.num_bytes / speeds.digest

    def verify_s(self, speeds: Speeds) -> Seconds:
        """Return the seconds of VERIFY, [messages]: it packs the installed weights again and computes the digest."""
        return self.digest_s(speeds) + self.staged_dst / speeds.copy + self.staged_dst_ops * speeds.op_s

    @property
    def staging_bytes(self) -> int:
        """Most bytes of buffers on any rank."""
        columns = (self.num_bytes, self.staged_src, self.staged_dst)
        largest, out, into = (int(column.max(initial=0)) for column in columns)
        return max(SENDS * out, min(number_of_buffers(into, largest), RECEIVES + SENDS) * into)


def _sums(values: npt.NDArray[np.generic], first: Ids) -> Ids:
    return np.add.reduceat(values.astype(np.int64), first) if len(first) > 0 else np.zeros(0, np.int64)


def _is_one_block(ops: OpArray, side: Literal["src", "dst"], layout: Layout) -> npt.NDArray[np.bool_]:
    """Return whether the elements of an op are consecutive in its parameter's memory, [ops]."""
    width = np.array([shape[-1] if len(shape) > 1 else 1 for shape in layout.param_shapes], dtype=np.int64)
    one_block: npt.NDArray[np.bool_] = (ops["rows"] == 1) | (ops["cols"] == width[ops[f"{side}_param"]])
    return one_block


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of a round, its terms, and the name of the largest term."""

    seconds: float
    bound_by: str
    terms: dict[str, float]


def predict(plan: TransferPlan, sizes: MessageSizes, replicas: int, speeds: Speeds) -> Prediction:
    """Predict the seconds of a round without failures, in closed form; `simulate` is more exact.

    The transfer takes as long as its busiest link or core, because links and cores work concurrently. Every further
    replica of the chain adds one hop of a message and its check. Each rank is assumed to have its own cores.
    """
    senders, receivers = plan.source.num_ranks, plan.target.num_ranks
    hidden_s = speeds.latency_s / SENDS  # the latency of a message overlaps with the transfer of another one
    sent = np.bincount(sizes.src, np.maximum(sizes.num_bytes / speeds.trainer_link, hidden_s), senders)
    hashed = np.bincount(sizes.src, sizes.pack_s(speeds) + sizes.digest_s(speeds), senders)
    received = np.bincount(sizes.dst, np.maximum(sizes.num_bytes / speeds.rollout_link, hidden_s), receivers)
    handled_s = sizes.unpack_s(speeds)
    if replicas > 1:
        handled_s = handled_s + sizes.digest_s(speeds) + sizes.relay_s(speeds)
    handled = np.bincount(sizes.dst, handled_s, receivers)
    busiest = {
        "trainer link": float(sent.max()),
        "trainer core": float(hashed.max()),
        "rollout link": float(received.max()),
        "rollout core": float(handled.max()),
    }
    one_hop = sizes.num_bytes / speeds.rollout_link + speeds.latency_s + sizes.digest_s(speeds) + sizes.relay_s(speeds)
    terms = {
        **busiest,
        "chain": (replicas - 1) * float(one_hop.max()),
        "verify": float(np.bincount(sizes.dst, sizes.verify_s(speeds), receivers).max()),
        "calls": len(calls_of(staged=False)) * speeds.rpc_s,
    }
    seconds = max(busiest.values()) + terms["chain"] + terms["verify"] + terms["calls"]
    return Prediction(seconds=seconds, bound_by=max(terms, key=lambda name: terms[name]), terms=terms)
