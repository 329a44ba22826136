"""Assigns this machine's GPUs to processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """`CUDA_VISIBLE_DEVICES` of the trainer ranks (shared, LOCAL_RANK picks one) and of each replica.

    `available` and `needed` count GPUs; with fewer available than needed everything runs on the CPU.
    """

    available: int
    needed: int
    trainer: str
    rollouts: tuple[str, ...]

    @property
    def on_gpus(self) -> bool:
        """Whether there are enough GPUs."""
        return self.available >= self.needed


def plan_devices(config: RunConfig, gpus: Sequence[str], *, trainer_ranks: int | None = None) -> DevicePlan:
    """Assign a GPU to every trainer rank, then `tensor_parallel` to every replica, in order.

    Two ranks never share a GPU: NCCL refuses that.

    Args:
        gpus: ids of those that can be used, as from `find_gpus`.
        trainer_ranks: None: those of the configuration.
    """
    ranks = config.trainer.world_size if trainer_ranks is None else trainer_ranks
    width, replicas = config.rollout.tensor_parallel, config.rollout.replicas
    needed = ranks + width * replicas
    if len(gpus) < needed:
        return DevicePlan(available=len(gpus), needed=needed, trainer="", rollouts=("",) * replicas)
    starts = range(ranks, needed, width)
    return DevicePlan(
        available=len(gpus),
        needed=needed,
        trainer=",".join(gpus[:ranks]),
        rollouts=tuple(",".join(gpus[start : start + width]) for start in starts),
    )
