"""The kinds of faults, what each promises, and the seeded order in which they come."""

import random
from dataclasses import dataclass

# A lease with the default settings, and what a take-over may take besides it.
LEASE_S, MARGIN_S = 15.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: what is done to whom, as in `kill trainer`.
        promise_s: most seconds from the fault to the next iteration, by the documents; None: they promise an end only.
        lasts_s: how long it lasts, from and to; a kill is over immediately.
    """

    name: str
    promise_s: float | None
    lasts_s: tuple[float, float] = (0.0, 0.0)

    @property
    def action(self) -> str:
        """What is done."""
        return self.name.split()[0]

    @property
    def victim(self) -> str:
        """To whom."""
        return self.name.split()[1]


# A process that starts again imports its engine: tens of seconds on two cores, which no document promises.
KINDS = (
    Kind(name="kill coordinator", promise_s=LEASE_S + MARGIN_S),
    Kind(name="kill trainer", promise_s=None),
    Kind(name="kill rollout", promise_s=LEASE_S + MARGIN_S),
    Kind(name="kill scheduler", promise_s=LEASE_S + MARGIN_S),
    Kind(name="kill reward", promise_s=LEASE_S + MARGIN_S),
    Kind(name="kill environment", promise_s=LEASE_S + MARGIN_S),
    Kind(name="kill redis", promise_s=LEASE_S + MARGIN_S),
    Kind(name="freeze coordinator", promise_s=None, lasts_s=(3, 25)),
    Kind(name="freeze trainer", promise_s=None, lasts_s=(3, 20)),
    Kind(name="freeze rollout", promise_s=LEASE_S + MARGIN_S, lasts_s=(3, 25)),
    Kind(name="freeze scheduler", promise_s=None, lasts_s=(3, 25)),
    Kind(name="freeze redis", promise_s=None, lasts_s=(2, 12)),
    Kind(name="cut rollout", promise_s=LEASE_S + MARGIN_S, lasts_s=(1, 20)),
    # In the midst of a weight sync (arena.py).
    Kind(name="part rollout", promise_s=LEASE_S + MARGIN_S, lasts_s=(8, 20)),
    Kind(name="cut trainer", promise_s=None, lasts_s=(1, 12)),
    Kind(name="cut coordinator", promise_s=None, lasts_s=(1, 12)),
    Kind(name="delay rollout", promise_s=LEASE_S + MARGIN_S, lasts_s=(5, 20)),
    Kind(name="delay trainer", promise_s=None, lasts_s=(5, 20)),
    Kind(name="delay coordinator", promise_s=None, lasts_s=(5, 20)),
    Kind(name="reset rollout", promise_s=LEASE_S + MARGIN_S, lasts_s=(1, 5)),
    Kind(name="fill disk", promise_s=None, lasts_s=(3, 12)),
    Kind(name="slow disk", promise_s=None, lasts_s=(5, 12)),
    Kind(name="move clock", promise_s=None, lasts_s=(5, 12)),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is to come.

    Attributes:
        waits_s: from the iteration before it.
        choice: 0 to 1, which of several victims.
    """

    kind: Kind
    waits_s: float
    lasts_s: float
    choice: float


def drawn(seed: int, number: int, kinds: tuple[Kind, ...] = KINDS, *, brief: bool = False) -> list[Fault]:
    """Draw faults: all kinds in a random order, then all again. brief: as short as they may be.

    >>> [fault.kind.name for fault in drawn(1, 2)] == [fault.kind.name for fault in drawn(1, 3)][:2]
    True
    """
    chance, found = random.Random(seed), list[Fault]()
    while len(found) < number:
        for kind in chance.sample(kinds, len(kinds)):
            found.append(
                Fault(
                    kind=kind,
                    waits_s=chance.uniform(0.0, 1.0 if brief else 3.0),
                    lasts_s=kind.lasts_s[0] if brief else chance.uniform(*kind.lasts_s),
                    choice=chance.random(),
                )
            )
    return found[:number]
