"""How a run ends before its time: on a stop signal what is finished is saved first; a failure is put into words.

A stop signal finds the run in one of these:

the run                          what happens
starting                         it is cancelled at once: nothing is unsaved
generating, scoring, held        cancelled; a checkpoint of the last finished iteration, if it has none yet
training, syncing, saving        the iteration is finished, without its evaluation; then the same
exporting, after its last one    it is finished

all within run.stop_timeout_s; after that the run is cancelled wherever it is, and goes on from an older checkpoint.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from servicekit.errors import Unavailable
from servicekit.life.exit_codes import EXIT_FAILED, EXIT_LOST_TRAINER
from servicekit.life.tasks import cancel, end_of, first_of
from servicekit.logs import get_logger

log = get_logger(__name__)
T = TypeVar("T")


class TrainerLost(Unavailable):
    """The run failed, and the trainer does not answer: whatever failed first, the trainer is what must start again."""


class Leaving:
    """What a run and whoever stops it agree on.

    Attributes:
        asked: the run is to end; set by whoever stops it.
        settled: the trainer holds what the run's state says, and nothing of a further iteration; set by the run.
        saves: there is something that the run would save; set by the run.
        left: the run has ended because it was asked to.
    """

    def __init__(self) -> None:
        self.asked, self.settled = asyncio.Event(), asyncio.Event()
        self.saves = False
        self.left = False

    async def leave(self, work: "asyncio.Task[None]", timeout_s: float) -> bool:
        """End the run that `work` is, as the table says. Returns: whether it has ended before its time."""
        self.asked.set()
        if self.saves:
            await asyncio.wait([work], timeout=timeout_s)
            if not work.done():
                log.warning("no checkpoint at the stop: not done within run.stop_timeout_s", seconds=timeout_s)
        await cancel(work)
        if not work.cancelled() and work.exception() is not None:
            log.warning("no checkpoint at the stop", error=str(work.exception()))
            return True
        return work.cancelled() or self.left

    async def until_safe(self, working: "asyncio.Task[None]") -> None:
        """Return when `working` is done, or the run was asked to end and may."""
        for event in (self.asked, self.settled):
            if (await first_of({"work": end_of(working), "event": event})).name == "work":
                return

    async def unless_asked(self, action: Coroutine[Any, Any, T]) -> T | None:
        """What the action returns; None if the run is to end before it does. It is cancelled then."""
        first = await first_of({"action": action, "asked": self.asked})
        return first.value if first.name == "action" else None


def words_of(error: BaseException) -> str:
    """A failure for people: the file of one that is about a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """The coordinator's exit code after a failure."""
    return EXIT_LOST_TRAINER if isinstance(error, TrainerLost) else EXIT_FAILED
