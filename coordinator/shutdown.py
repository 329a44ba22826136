"""How a run ends early: a stop signal saves finished work first. Also exit codes of failures.

When the stop signal comes

while the run is                 what happens
starting                         it is cancelled immediately: nothing is unsaved
generating, scoring, paused      it is cancelled; a checkpoint of the last finished iteration, if it has none yet
training, syncing, saving,       the iteration is finished, without its evaluation; then the same
  exporting
syncing, and a round fails or    the same, without the sync: no iteration will need it
  replicas are awaited
exporting, after the last one    the export is finished
failed, and waits for a trainer  it is cancelled immediately: what was not saved is lost

all within run.stop_timeout_s; after that the run is cancelled wherever it is, and a resume uses an older checkpoint.

A trainer that was asked to end says so in its status while something is unsaved, and serves on for as long. The run
saves a checkpoint as soon as the trainer's policy is the run's, and continues when the trainer is back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from servicekit.errors import TandemError, Unavailable
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_LOST_TRAINER, EXIT_OK
from servicekit.lifecycle.tasks import cancel, end_of, first_of
from servicekit.logs import get_logger
from tandem_clients.probing import ProbedService

# Between two questions whether the trainer ends; and for an answer.
_ASK_S, _STATUS_TIMEOUT_S = 1.0, 10.0

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Exits:
    """Exit codes for whoever starts the coordinator again; the others are those of servicekit.lifecycle.exit_codes.

    Attributes:
        interrupted: after a signal, if the run is not over.
        retry: after a failure, if another attempt may do better (retries.py), else it is EXIT_GIVEN_UP;
            None: failures have the codes 1 and 3, and are not counted.
    """

    interrupted: int = EXIT_OK
    retry: int | None = None

    @property
    def replaced(self) -> int:
        """The code of one whose place another coordinator has taken: no failure of the run, so a Job counts none."""
        return EXIT_FAILED if self.retry is None else self.retry


class TrainerLost(Unavailable):
    """The run failed, and the trainer does not answer: whatever failed first, the trainer must be restarted."""


class Leaving:
    """The state shared by a run and the code that stops it.

    Attributes:
        asked: the run is to end; set by `leave`.
        stopping: the process is to end.
        settled: the trainer's state matches the run's, and no further iteration has changed it; set by the run.
        saves: the run has begun and not failed, so may have something to save; set by the run.
        left: the run has ended because it was asked to.
    """

    def __init__(self) -> None:
        self.asked, self.settled = asyncio.Event(), asyncio.Event()
        self.stopping = False
        self.saves = False
        self.left = False

    def renew(self) -> None:
        """Prepare for the next attempt."""
        if not self.stopping:
            self.asked, self.settled = asyncio.Event(), asyncio.Event()
            self.saves = self.left = False

    async def leave(self, work: "asyncio.Task[None]", timeout_s: float) -> bool:
        """End the run `work` as the table says. Returns: whether it ended early."""
        self.stopping = True
        self.asked.set()
        if self.saves:
            await asyncio.wait([work], timeout=timeout_s)
            if not work.done():
                log.warning("shutdown: checkpoint not saved within run.stop_timeout_s", seconds=timeout_s)
        await cancel(work)
        if not work.cancelled() and work.exception() is not None:
            log.warning("shutdown: checkpoint not saved", error=str(work.exception()))
            return True
        return work.cancelled() or self.left

    async def until_safe(self, working: "asyncio.Task[None]") -> None:
        """Return when `working` is done, or when the run was asked to end and is settled."""
        for event in (self.asked, self.settled):
            if (await first_of({"work": end_of(working), "event": event})).name == "work":
                return

    async def unless_asked(self, action: Coroutine[Any, Any, T]) -> T | None:
        """Await the action. Returns: its result; None: it was cancelled, because the run is to end."""
        first = await first_of({"action": action, "asked": self.asked})
        return first.value if first.name == "action" else None


async def follow(trainer: ProbedService, leaving: Leaving, save: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Ask the trainer every second whether it ends, and save once it does, if there is something to save.

    It is asked further meanwhile: a trainer that no coordinator asks ends without its checkpoint.

    Args:
        save: saves a checkpoint, and lets the trainer do no further step until the event says that it has ended.
    """
    saving: asyncio.Task[None] | None = None
    gone = asyncio.Event()
    try:
        while True:
            try:
                status = await trainer.status(timeout_s=_STATUS_TIMEOUT_S)
                ends, is_gone = status.leaving, not status.step_id  # another one: this has done a step that is unsaved
            except TandemError:  # whatever needs the trainer notices, and says so
                ends, is_gone = False, True
            if is_gone:
                gone.set()
            if ends and leaving.saves and (saving is None or saving.done()):
                log.warning("trainer asked to end: saving a checkpoint")
                gone = asyncio.Event()
                saving = asyncio.create_task(_saved(save(gone)), name="save-for-trainer")
            await asyncio.sleep(_ASK_S)
    finally:
        if saving is not None:
            await cancel(saving)


async def _saved(saving: Awaitable[None]) -> None:
    try:
        await saving
    except TandemError as error:
        log.warning("checkpoint for the next trainer not saved", error=str(error))


def exit_code_of(error: BaseException) -> int:
    """Return the coordinator's exit code after a failure."""
    return EXIT_LOST_TRAINER if isinstance(error, TrainerLost) else EXIT_FAILED
