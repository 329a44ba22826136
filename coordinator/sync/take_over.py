"""What a restarted run does where trainer or replicas have gone beyond the checkpoint that it goes on from.

Versions only grow, and a version names one policy. So the checkpoint's policy gets a version that nobody has had:

| trainer is at | newest replica     | the run goes on                                                            |
|---------------|--------------------|----------------------------------------------------------------------------|
| ours          | at most ours       | at ours                                                                    |
| ours          | beyond ours        | at one beyond all, under which the trainer restores the checkpoint's policy |
| another       | anywhere           | the same                                                                   |
"""

from pathlib import Path

from coordinator.clients.trainer import Trainer
from coordinator.sync.weights import WeightSync
from servicekit.logs import get_logger

log = get_logger(__name__)


async def take_over(trainer: Trainer, weights: WeightSync, ours: int, checkpoint: Path | None) -> int:
    """Bring the trainer to the run's checkpoint, at a version that no replica must go back to.

    Args:
        ours: the checkpoint's version.
        checkpoint: the trainer's folder in it; None: the run has none yet, its policy is the initial model.
    Returns: the version of the run from here on. Publish it next.
    Raises: TandemError: a service's, named.
    """
    trained = (await trainer.status()).policy_version
    served = await weights.newest_version()
    if trained == ours and served <= ours:
        return ours
    beyond = max(ours, trained, served) + 1
    log.warning("taking over", trainer_version=trained, replica_version=served, checkpoint_version=ours, new=beyond)
    await trainer.restore(checkpoint, beyond)
    return beyond
