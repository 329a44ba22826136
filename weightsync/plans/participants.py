"""The ranks of a round's communicator: the sender's first, then each replica's in chain order."""

from dataclasses import dataclass, replace

from tandem_api.weights.v1 import weights_pb2
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE


@dataclass(frozen=True, kw_only=True)
class Participants:
    """The ranks of a round.

    Attributes:
        trainer: parallel sizes of the sender: the trainer, or the replica that is the round's source.
        replicas: parallel sizes, by replica name.
        slots: slot of each communicator rank.
        first_rank: communicator rank of TP rank 0, by replica name.
    """

    trainer: Parallel
    replicas: dict[str, Parallel]
    slots: tuple[str, ...]
    first_rank: dict[str, int]

    @classmethod
    def of_round(cls, round_: weights_pb2.Round) -> "Participants":
        """Read the participants of a round."""
        trainer, source = Parallel.from_proto(round_.trainer), round_.source
        if source:
            trainer = replace(trainer, engine=trainer.engine or ROLLOUT_ENGINE)
        ranks = range(trainer.world_size)
        slots = [rollout_slot(source, rank) if source else trainer_slot(rank) for rank in ranks]
        replicas, first_rank = {}, {}
        for replica in round_.replicas:
            parallel = Parallel.from_proto(replica.parallel)
            replicas[replica.name] = parallel
            first_rank[replica.name] = len(slots)
            slots += [rollout_slot(replica.name, rank) for rank in range(parallel.world_size)]
        return cls(trainer=trainer, replicas=replicas, slots=tuple(slots), first_rank=first_rank)

    def chains(self) -> dict[Parallel, list[str]]:
        """Return the replica names of each layout, in chain order; the trainer sends to the first."""
        chains: dict[Parallel, list[str]] = {}
        for name, parallel in self.replicas.items():
            chains.setdefault(parallel, []).append(name)
        return chains

    @property
    def longest_chain(self) -> int:
        """Number of replicas of the longest chain."""
        return max((len(names) for names in self.chains().values()), default=0)


def trainer_slot(rank: int) -> str:
    """Return the slot of a trainer rank."""
    return f"trainer/{rank}"


def rollout_slot(replica: str, tp_rank: int) -> str:
    """Return the slot of a rollout rank."""
    return f"{replica}/{tp_rank}"
