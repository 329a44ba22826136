"""Agrees on a version when a restarted run finds trainer or replicas ahead of the checkpoint that it resumes from.

Versions only grow, and a version names one policy. So the checkpoint's policy gets a version that no service has had:

| trainer is at | newest replica     | the run continues                                                          |
|---------------|--------------------|----------------------------------------------------------------------------|
| ours          | at most ours       | at ours                                                                    |
| ours          | beyond ours        | at one beyond all, under which the trainer restores the checkpoint's policy |
| another       | anywhere           | the same                                                                   |
"""

from pathlib import Path

from coordinator.sync.weight_sync import WeightSync
from servicekit.logs import get_logger
from tandem_clients.trainer import Trainer

log = get_logger(__name__)


async def take_over(trainer: Trainer, weights: WeightSync, ours: int, checkpoint: Path | None) -> int:
    """Bring the trainer to the run's checkpoint, at a version that no replica is beyond.

    Args:
        ours: the checkpoint's version.
        checkpoint: the trainer's folder in it; None: the run has no checkpoint yet, its policy is the initial model.
    Returns: the run's version from now on; the caller publishes it next.
    Raises: TandemError: a service's, with its name.
    """
    trained = (await trainer.status()).policy_version
    served = await weights.newest_version()
    if trained == ours and served <= ours:
        return ours
    beyond = max(ours, trained, served) + 1
    versions = {"trainer_version": trained, "replica_version": served, "checkpoint_version": ours}
    log.warning("restoring the checkpoint under a new version", **versions, new=beyond)
    await trainer.restore(checkpoint, beyond)
    return beyond
