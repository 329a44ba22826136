"""The trainer of a run that outlives its loss: what was asked of it is asked again once it is back where it was.

what happened to the trainer         what the run does
it was lost, and starts again        generation continues up to the schedule's bound; it restores the newest checkpoint,
                                     does the steps after it again (redo.py), and gets what failed once more
one of these steps is not kept       resumes from its newest checkpoint (retries.py)
it answers, and is where it was      fails with the error: the trainer was not its cause
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.ledger.redo import WayBack, way_back
from coordinator.shutdown import TrainerLost
from coordinator.watch import metrics
from coordinator.watch.life import Life
from servicekit.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    Internal,
    NotReady,
    PeerLost,
    TandemError,
    Unavailable,
    WrongVersion,
)
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.fleet import LOOK_INTERVAL_S
from tandem_clients.flow import Sample, TrainBatch, TrainResult
from tandem_clients.trainer import Trainer
from tandem_files.checkpoints import newest_sound

# What a trainer that is being lost causes while its first rank still answers, and for how long it does.
_LOSSES = (Aborted, DeadlineExceeded, Internal, NotReady, PeerLost, Unavailable, WrongVersion)
NEWS_S = 5.0
# A trainer lost so many times in a row without a step between would be lost again.
MAX_RETURNS = 3

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class ReturningTrainer:
    """The trainer, as an iteration needs it (tandem_clients.trainer.Learner).

    Attributes:
        until_back: waits until it answers again when it was lost with an error (fleet/services.py); raises TandemError:
            it does not come back, or was not lost. None: a trainer that is lost ends what needs it.
        ending: set when the run is to end: nothing is waited for then.
        written: waits until the steps that were sent are kept.
        warn: gets messages for the run's user; life: notes losses and returns.
        version, step_id: where it is: its policy, and the step that led to it, "" for none.
    """

    trainer: Trainer
    run_dir: Path
    until_back: Callable[[TandemError], Awaitable[None]] | None
    ending: asyncio.Event
    written: Callable[[], Awaitable[None]]
    warn: Callable[[str], None] = log.warning
    life: Life = field(default_factory=Life)
    version: int = field(default=0, init=False)
    step_id: str = field(default="", init=False)
    _returns: int = field(default=0, init=False)
    # The last step that was sent, which may be done although its reply is lost.
    _sent: str = field(default="", init=False)

    async def train_step(self, batch: TrainBatch, sent: asyncio.Event) -> TrainResult:
        """Run one GRPO step; `sent` is set when the batch is with the trainer."""
        self._sent = batch.step_id
        result = await self.persist(lambda: self.trainer.train_step(batch, sent))
        self.version, self.step_id, self._returns = result.policy_version, result.step_id, 0
        return result

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> NDArray[np.float32]:
        """Compute the log-probs of all completion tokens: [T]."""
        return await self.when_there(lambda: self.trainer.logprobs(samples, reference=reference))

    async def when_there(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work that is of the trainer's policy and does not say so itself. Raises: as persist."""

        async def checked() -> T:
            status = await self.trainer.status()
            if not self._is_there(status):
                raise WrongVersion(f"the trainer is at policy version {status.policy_version}, not {self.version}")
            return await work()

        return await self.persist(checked)

    def _is_there(self, status: trainer_pb2.GetStatusResponse) -> bool:
        """Whether it is where it was; it says no step when it has loaded a checkpoint or the initial model."""
        return status.policy_version == self.version and status.step_id in ("", self.step_id)

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work that needs the trainer, again if it was lost meanwhile and is back.

        Raises: the error of the work, if the trainer was not lost, or cannot come back to where it was.
        """
        while True:
            try:
                return await work()
            except TandemError as error:
                lost: TandemError | None = error
            while lost is not None:
                lost = await self._bring_back(lost)

    def stands_at(self, version: int, step_id: str) -> None:
        """Note where the trainer is: its policy, and the step that led to it."""
        self.version, self.step_id = version, step_id

    async def catch_up(self, folder: Path | None, version: int, step_id: str) -> bool:
        """Bring a trainer that has started again to a policy, by the steps after a checkpoint.

        Args:
            folder: of the checkpoint; None: there is none.
        Returns: whether it has that policy.
        Raises: TandemError: the trainer is lost.
        """
        way = await self._way(folder, version, step_id)
        now = await self.trainer.status()
        if way is None or not way.steps:
            return False
        # At the checkpoint, or half way, where a coordinator was lost while it brought the trainer back.
        at = {"": way.version} | {step.step_id: step.version + 1 for step in way.steps[:-1]}
        if now.policy_version > at.get(now.step_id, -1):
            return False
        self.life.note("trainer lost", "it had started again when the coordinator began")
        try:
            await self._redo(way)
        except TandemError as error:
            await self.trainer.status()
            self.warn(f"the steps since the trainer's checkpoint were not done again: {error}")
            return False
        self.warn(f"the trainer was lost: {len(way.steps)} steps since its checkpoint were done again")
        return True

    async def _bring_back(self, error: TandemError) -> TandemError | None:
        """Wait for the trainer, and bring it to where it was.

        Returns: the error by which it was lost again; None: it is there.
        Raises: `error`: it was not lost, or the run is to end; TrainerLost: it cannot come back to where it was.
        """
        if self.ending.is_set() or isinstance(error, Fenced | TrainerLost) or not await self._is_lost(error):
            raise error
        self.life.note("trainer lost", str(error))
        try:
            sound = await asyncio.to_thread(newest_sound, self.run_dir, deep=False)
            way = await self._way(None if sound is None else sound.folder, self.version, self.step_id)
        except (OSError, ConfigError) as damaged:
            raise TrainerLost(f"{error}; the trainer was lost, and its checkpoint too: {damaged}") from error
        self._returns += 1
        if self.until_back is None or way is None:
            raise TrainerLost(
                f"{error}; the trainer was lost, and the steps since its checkpoint are not kept"
            ) from error
        if self._returns > MAX_RETURNS:
            raise TrainerLost(f"{error}; the trainer was lost {self._returns} times without a step between") from error
        begun_s = self._now_s()
        self.warn(f"the trainer is lost, generation continues while it starts again: {error}")
        first = await first_of({"back": self.until_back(error), "ending": self.ending})
        if first.name == "ending":
            raise error
        back_s = self._now_s()
        try:
            await self._redo(way)
        except TandemError as again:
            return again
        metrics.TRAINER_RETURNS.inc()
        now_s = self._now_s()
        redone = f"{len(way.steps)} steps since its checkpoint were done again in {now_s - back_s:.1f} s"
        self.life.note("trainer back", f"{redone}, nothing was generated again", tokens=0)
        self.warn(f"the trainer is back after {now_s - begun_s:.0f} s: {redone}, nothing was generated again")
        return None

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    async def _is_lost(self, error: TandemError) -> bool:
        """Whether it does not answer, or is not where it was; looked at for a while if it may be about to end."""
        deadline_s = self._now_s() + (NEWS_S if isinstance(error, _LOSSES) else 0.0)
        while True:
            try:
                status = await self.trainer.status()
            except TandemError:
                return True
            if not self._is_there(status) and (not self._sent or status.step_id != self._sent):
                return True
            if self._now_s() >= deadline_s:
                return False
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _way(self, folder: Path | None, version: int, step_id: str) -> WayBack | None:
        await self.written()
        try:
            return await asyncio.to_thread(way_back, self.run_dir, folder, version, step_id)
        except (OSError, ConfigError) as error:
            log.warning("way back of the trainer not read", error=str(error))
            return None

    async def _redo(self, way: WayBack) -> None:
        """Restore the checkpoint, and do the steps after it again. Raises: TandemError: of the trainer."""
        now = await self.trainer.status()
        if self._sent and now.step_id == self._sent:  # it was not lost: only a reply was
            return
        done = [step.step_id for step in way.steps]
        steps = way.steps[done.index(now.step_id) + 1 :] if now.step_id in done else way.steps
        if steps is way.steps and (now.policy_version, now.step_id) != (way.version, ""):
            await self.trainer.restore(way.folder, way.version)
        for step in steps:
            await self.trainer.redo_step(step.requests, step.step_id)
            metrics.REDONE_STEPS.inc()
        log.info(
            "trainer is where it was",
            version=way.version + len(way.steps),
            steps=len(steps),
            checkpoint=str(way.folder),
        )
