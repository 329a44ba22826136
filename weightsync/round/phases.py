"""The phases of a round, one row each: all code that handles phases reads this table.

It gives the coordinator's order of calls and the deadlines (deadlines.py), the guards of trainer ranks, replicas and
their ranks (guard.py). The phases of forecast and simulation, and the table in docs/wire-protocol.md, come from it too.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tandem_api.weights.v1 import weights_pb2 as pb

Phase: TypeAlias = pb.RoundPhase.ValueType

PREPARE, PAUSE, TRANSFER = pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_PAUSE, pb.ROUND_PHASE_TRANSFER
VERIFY, COMMIT, ABORT = pb.ROUND_PHASE_VERIFY, pb.ROUND_PHASE_COMMIT, pb.ROUND_PHASE_ABORT


class Role(Enum):
    """A participant's role in a round."""

    # The trainer, the replica that is the round's source, and their ranks: what they have, they keep.
    SENDER = "sender"
    # A rollout replica: its service, which stops and starts generation.
    REPLICA = "replica"
    # A rank of a replica: it holds a shard of the weights.
    RANK = "rank"


ALL = frozenset(Role)


class Wait(Enum):
    """The deadline of a round that bounds a phase."""

    FORMATION = "formation"
    TRANSFER = "transfer"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class PhaseRule:
    """One phase.

    Attributes:
        roles: roles that have work in it; for others it changes nothing.
        needs: phases that must be done before it; `required` resolves them for a role and a kind of round.
        wait: the deadline of its work.
        is_in_staged: whether a staged round has it.
        in_call_before: whether it is a part of the call of the phase before it, on those that have both: it waits for
            no other participant.
        trainer, replica: what it does there, for the documentation.
        failure: the worst state that its failure leaves, for the documentation.
    """

    phase: Phase
    roles: frozenset[Role]
    needs: frozenset[Phase]
    wait: Wait
    is_in_staged: bool = True
    in_call_before: bool = False
    trainer: str
    replica: str
    failure: str

    @property
    def name(self) -> str:
        """The name as metrics, spans and options spell it: "prepare"."""
        return name_of(self.phase)


def name_of(phase: Phase) -> str:
    """Name a phase as metrics, spans and options spell it.

    >>> name_of(PREPARE)
    'prepare'
    """
    return pb.RoundPhase.Name(phase).removeprefix("ROUND_PHASE_").lower()


# A round without failures, in order. Up to VERIFY, any failure gives the round up; at COMMIT every replica has verified
# its own bytes, so that the loss of one does not undo the others.
ROUND: tuple[PhaseRule, ...] = (
    PhaseRule(
        phase=PREPARE,
        roles=ALL,
        needs=frozenset(),
        wait=Wait.FORMATION,
        trainer="plan, coverage, communicator of the epoch",
        replica="the same",
        failure="aborted, old version serves on",
    ),
    PhaseRule(
        phase=PAUSE,
        roles=frozenset({Role.REPLICA}),
        needs=frozenset({PREPARE}),
        wait=Wait.TRANSFER,
        is_in_staged=False,
        # PREPARE ends with the exchange of cards: a replica that has done it knows that all ranks have planned alike.
        in_call_before=True,
        trainer="-",
        replica="generation stops at a token boundary (in place)",
        failure="aborted, old version serves on",
    ),
    PhaseRule(
        phase=TRANSFER,
        roles=ALL,
        needs=frozenset({PREPARE, PAUSE}),
        wait=Wait.TRANSFER,
        trainer="sends",
        replica="receive: into spare buffers (staged) or into the parameters (in place)",
        failure="staged: aborted; in place: poisoned",
    ),
    PhaseRule(
        phase=VERIFY,
        roles=frozenset({Role.REPLICA, Role.RANK}),
        needs=frozenset({TRANSFER}),
        wait=Wait.TRANSFER,
        in_call_before=True,
        trainer="-",
        replica="pack what was installed again and compare digests",
        failure="as TRANSFER",
    ),
    PhaseRule(
        phase=COMMIT,
        roles=ALL,
        needs=frozenset({VERIFY}),
        wait=Wait.TRANSFER,
        trainer="the round is over",
        replica="the version flips, caches are flushed, generation resumes",
        failure="poisoned",
    ),
)
# After a failure, at any phase.
GIVE_UP = PhaseRule(
    phase=ABORT,
    roles=ALL,
    needs=frozenset(),
    wait=Wait.ABORT,
    trainer="gives the round up",
    replica="the same",
    failure="-",
)
PHASES: tuple[Phase, ...] = tuple(rule.phase for rule in ROUND)
NAMES: tuple[str, ...] = tuple(rule.name for rule in ROUND)
RULES: dict[Phase, PhaseRule] = {rule.phase: rule for rule in (*ROUND, GIVE_UP)}

# Parts of a phase's work, in the order in which a phase has them: the keys of PhaseReport.seconds.
STAGES = ("onload", "prepare", "rendezvous", "pause", "transfer", "verify", "install", "commit", "offload")


def rules_of(*, staged: bool) -> tuple[PhaseRule, ...]:
    """Return the phases of a staged round, or of one in place, in order."""
    return tuple(rule for rule in ROUND if rule.is_in_staged or not staged)


def calls_of(*, staged: bool) -> tuple[tuple[PhaseRule, ...], ...]:
    """Return the phases of a round by the coordinator's calls, each of which has one or more of them, in order.

    >>> [[rule.name for rule in rules] for rules in calls_of(staged=True)]
    [['prepare'], ['transfer', 'verify'], ['commit']]
    """
    calls: list[tuple[PhaseRule, ...]] = []
    for rule in rules_of(staged=staged):
        if rule.in_call_before:
            calls[-1] = (*calls[-1], rule)
        else:
            calls.append((rule,))
    return tuple(calls)


def required(phase: Phase, role: Role, *, staged: bool) -> frozenset[Phase]:
    """Return the phases that `role` must have done before `phase`: its own among all that the phase depends on.

    >>> [name_of(needed) for needed in sorted(required(COMMIT, Role.SENDER, staged=False))]
    ['prepare', 'transfer']
    >>> [name_of(needed) for needed in sorted(required(TRANSFER, Role.REPLICA, staged=True))]
    ['prepare']
    """
    found: set[Phase] = set()
    left = set(RULES[phase].needs)
    while left:
        needed = left.pop()
        found.add(needed)
        left |= RULES[needed].needs - found
    own = {rule.phase for rule in rules_of(staged=staged) if role in rule.roles}
    return frozenset(found & own)


def first_write(*, staged: bool) -> Phase:
    """Return the first phase whose failure may leave a replica with a mixture of two versions."""
    return COMMIT if staged else TRANSFER
