"""Finds out whose call a round has failed with. Pure.

| the errors of the round                                               | are the fault of                          |
|-----------------------------------------------------------------------|-------------------------------------------|
| no answer to a probe, or a slot that was lost, of a replica           | that replica: it is lost                  |
| of a replica: anything but what all may see alike (Internal, ...)     | that replica                              |
| else, of the trainer: the same                                        | the trainer                               |
| of one replica alone: ConfigError, DeadlineExceeded, SlotTaken        | that replica                              |
| DeadlineExceeded of several, two of which name ranks of one replica   | the replica that most of them name        |
| only PeerLost, Aborted; or ConfigError, DeadlineExceeded of several   | unknown: whoever fails alone              |
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from servicekit.errors import Aborted, ConfigError, DeadlineExceeded, PeerLost, SlotTaken, TandemError
from tandem_clients.probing import NoAnswer

# What a participant may say because of another one.
CONTAGIOUS = (PeerLost, Aborted, DeadlineExceeded, ConfigError)
# So many participants must name a replica.
_VOTES = 2


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Whose fault a failed round is; without any error it is not known.

    Attributes:
        lost, failed: errors of replicas that no longer answer, and of those that failed.
        trainer: the trainer's error, if it is the trainer's fault.
        named: how many others name a replica's ranks in their errors.
    """

    lost: Mapping[str, TandemError] = field(default_factory=dict)
    failed: Mapping[str, TandemError] = field(default_factory=dict)
    trainer: TandemError | None = None
    named: Mapping[str, int] = field(default_factory=dict)


def blame(errors: Mapping[str, TandemError], trainer: str, replicas: Iterable[str]) -> Blame:
    """Find out whose fault a round's errors are.

    Args:
        errors: by participant.
        trainer: name of the trainer.
    """
    named = _named(errors, replicas)
    lost = {name: error for name, error in errors.items() if isinstance(error, NoAnswer)}
    own = {name: error for name, error in errors.items() if not isinstance(error, CONTAGIOUS)}
    failed = {name: error for name, error in own.items() if name != trainer}
    lost_replicas = {name: error for name, error in lost.items() if name != trainer}
    if failed or lost_replicas:
        return Blame(lost=lost_replicas, failed=failed, named=named)
    if trainer in own or trainer in lost:
        return Blame(trainer=errors[trainer], named=named)
    shared = {name: error for name, error in errors.items() if _is_a_claim(error)}
    if len(shared) == 1 and trainer not in shared:
        return Blame(failed=shared, named=named)
    culprit = _voted(named) if any(isinstance(error, DeadlineExceeded) for error in shared.values()) else None
    if culprit is not None:
        error = errors.get(culprit) or next(error for error in shared.values() if _names(error, culprit))
        return Blame(failed={culprit: error}, named=named)
    return Blame(named=named)


def _is_a_claim(error: TandemError) -> bool:
    return isinstance(error, (ConfigError, DeadlineExceeded, SlotTaken))


def _named(errors: Mapping[str, TandemError], replicas: Iterable[str]) -> dict[str, int]:
    """Count for each replica the other participants whose errors name a rank of it."""
    return {
        replica: sum(name != replica and _names(error, replica) for name, error in errors.items())
        for replica in replicas
    }


def _names(error: TandemError, replica: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(replica)}/\d", str(error)) is not None


def _voted(named: Mapping[str, int]) -> str | None:
    """Return the replica that most participants name, if one is ahead of the others."""
    ahead = Counter(named).most_common(2)
    if not ahead or ahead[0][1] < _VOTES or (len(ahead) == 2 and ahead[0][1] == ahead[1][1]):
        return None
    return ahead[0][0]
