"""Deadlines of a phase: each level waits longer than the level below, so that the cause arrives before its deadline.

who waits                      for                          seconds
rank                           its peers                    the round's formation or transfer timeout
rank's watch over its work     waits without a deadline     + WATCH_MARGIN_S
replica, in PAUSE              generate calls               the transfer timeout, at most DRAIN_S; + END_CALLS_S
replica, or a host of it       its ranks                    + RANK_MARGIN_S; an ABORT at most ABORT_S + that
leader of several hosts        a host                       + HOST_MARGIN_S
trainer's rank 0               the trainer's ranks          both timeouts + COMMAND_MARGIN_S
coordinator                    trainer and replicas         both timeouts + CALL_MARGIN_S
replica                        the coordinator's next phase both timeouts + SILENCE_MARGIN_S

tests/unit/weightsync/test_round.py holds the order.
"""

from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round.phases import RULES, Phase, Wait

# After the deadline, so that waits that have one can name the peer that they waited for.
WATCH_MARGIN_S = 1.0
RANK_MARGIN_S = 5.0
HOST_MARGIN_S = 4.0
COMMAND_MARGIN_S = 5.0
CALL_MARGIN_S = 30.0
# Seconds for generate calls to end by themselves; then, for them to end after their abort.
DRAIN_S, END_CALLS_S = 30.0, 15.0
# A coordinator that waits for one participant may be silent towards the others for call_s(); twice that margin means
# that it is lost.
SILENCE_MARGIN_S = 2 * CALL_MARGIN_S
# ABORT ends a rank's waits. A rank that does not answer within this is frozen, and must not delay the others.
ABORT_S = 10.0

# Outside rounds, by level: a read of published weights from disk; checksums of all parameters.
RANK_LOAD_S, HOST_LOAD_S, CALL_LOAD_S = 590.0, 594.0, 600.0
RANK_CHECKSUM_S, HOST_CHECKSUM_S = 55.0, 59.0
# Deadline of PauseGeneration, as rollout.proto documents it.
CALL_PAUSE_S = 60.0


def work_s(phase: Phase, round_: pb.Round) -> float:
    """Deadline of a rank's work in a phase."""
    waits = {
        Wait.FORMATION: round_.formation_timeout_s,
        Wait.TRANSFER: round_.transfer_timeout_s,
        Wait.ABORT: min(round_.transfer_timeout_s, ABORT_S),
    }
    return waits[RULES[phase].wait]


def rank_s(phase: Phase, round_: pb.Round) -> float:
    """Deadline of a call to a rank."""
    return work_s(phase, round_) + RANK_MARGIN_S


def drain_s(round_: pb.Round) -> float:
    """Time for the running generate calls to end when a replica pauses."""
    return min(DRAIN_S, round_.transfer_timeout_s)


def host_s(phase: Phase, round_: pb.Round) -> float:
    """Deadline of a call to a further host of a replica."""
    return rank_s(phase, round_) + HOST_MARGIN_S


def command_s(round_: pb.Round) -> float:
    """Deadline of a command to the trainer's ranks: one may still be in the phase before."""
    return _both_s(round_) + COMMAND_MARGIN_S


def call_s(round_: pb.Round) -> float:
    """Deadline of the coordinator's call to the trainer or to a replica."""
    return _both_s(round_) + CALL_MARGIN_S


def silence_s(round_: pb.Round) -> float:
    """Time without a phase after which a replica gives the round up."""
    return _both_s(round_) + SILENCE_MARGIN_S


def _both_s(round_: pb.Round) -> float:
    return round_.formation_timeout_s + round_.transfer_timeout_s
