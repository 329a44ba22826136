"""Where a restarted run continues: where it ended, if the trainer still stands there, else at its newest checkpoint."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.ledger.ledger import Ledger
from coordinator.ledger.returning import ReturningTrainer
from coordinator.record.resuming import Renewal
from coordinator.record.state import RunState
from coordinator.sync.weight_sync import WeightSync
from servicekit.logs import get_logger
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.trainer import Trainer

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LastIteration:
    """The run after its last iteration, as state.json has it; newer than its checkpoint.

    Attributes:
        renewal: as of the checkpoint (resuming.py).
        may_repeat: whether a train step of this process would be that of the process before: no setting has changed.
    """

    state: RunState
    renewal: Renewal = field(default_factory=Renewal)
    may_repeat: bool = False

    def is_of(self, trainer: trainer_pb2.GetStatusResponse) -> bool:
        """Whether the trainer has the policy with which this iteration ended: it has outlived the coordinator.

        A version alone does not say so: another checkpoint of the run may have been restored to it.
        """
        ours = self.state.policy_version, self.state.step_id
        return bool(self.state.step_id) and (trainer.policy_version, trainer.step_id) == ours

    async def bring(
        self, trainer: ReturningTrainer, folder: Path | None, ledger: Ledger, served: int, *, sends: bool
    ) -> None:
        """Let a trainer that has begun at the checkpoint do the steps since then again, or the rest, if they are kept.

        The step after this iteration is one of them, if it was sent. Without a replica beyond what they lead to.

        Args:
            folder: of the checkpoint; None: there is none.
            served: the newest version that a replica has had.
            sends: whether the step after this iteration may be sent again.
        Raises: TandemError: of the trainer.
        """
        if self.is_of(await trainer.trainer.status()):
            return
        ours = self.state.policy_version
        sent = await asyncio.to_thread(ledger.past.sent_step, self.state.iteration + 1) if sends else ""
        if sent and served <= ours + 1 and await trainer.catch_up(folder, ours + 1, sent):
            return
        if served <= ours:
            await trainer.catch_up(folder, ours, self.state.step_id)

    async def sent_step(self, trainer: trainer_pb2.GetStatusResponse, ledger: Ledger) -> str:
        """Return the id of the next train step, if the trainer has done it and its samples are kept; "": else.

        Sent again under this id, it is answered with the first reply: so the iteration is finished as it was begun.
        """
        if not self.may_repeat or trainer.policy_version != self.state.policy_version + 1:
            return ""
        step_id = await asyncio.to_thread(ledger.past.sent_step, self.state.iteration + 1)
        return step_id if step_id == trainer.step_id else ""


async def take_over(trainer: Trainer, weights: WeightSync, ours: int, checkpoint: Path | None) -> int:
    """Bring the trainer to the checkpoint that a restarted run resumes from, at a version that no replica is beyond.

    Versions only grow, and a version names one policy, so the checkpoint's gets a version that no service has had:

    | trainer is at | newest replica     | the run continues                                                          |
    |---------------|--------------------|----------------------------------------------------------------------------|
    | ours          | at most ours       | at ours                                                                    |
    | ours          | beyond ours        | at one beyond all, under which the trainer restores the checkpoint's policy |
    | another       | anywhere           | the same                                                                   |

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
