"""Between the turns of a completion: an environment answers, and the completion continues after that, or has ended."""

import asyncio
from array import array
from collections.abc import Callable
from functools import partial
from typing import Protocol

from servicekit.lifecycle.tasks import cancel
from tandem_clients.sample_stream import OpenGroup


class Answering(Protocol):
    """The environments of a dispatch's completions."""

    async def answer(self, group: OpenGroup, index: int) -> "array[int]":
        """Let an environment answer the last turn of a completion, and note what was said in its transcript.

        Returns: ids that follow before the policy's next turn; none: the completion has ended.
        """
        ...

    async def close(self) -> None:
        """End the episodes that are left."""
        ...


class Turns:
    """Answers under way.

    Args:
        answering: None: every completion has one turn.
        answered: called with a group of which a completion continues, or has ended.
        wake: called after each answer.
    """

    def __init__(
        self, answering: Answering | None, answered: Callable[[OpenGroup], None], wake: Callable[[], None]
    ) -> None:
        self._answering, self._answered, self._wake = answering, answered, wake
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._error: BaseException | None = None

    @property
    def are_taken(self) -> bool:
        """Whether completions have several turns."""
        return self._answering is not None

    def __len__(self) -> int:
        """Return the number of answers under way."""
        return len(self._tasks)

    def begin(self, group: OpenGroup) -> None:
        """Let the environments answer the turns of a group that have ended."""
        for index in group.acting:
            name = (group.group_id, index)
            if name not in self._tasks:
                task = asyncio.create_task(self._answer(group, index), name=f"turn {group.sample_id(index)}")
                self._tasks[name] = task
                task.add_done_callback(partial(self._note, name))

    def check(self) -> None:
        """Raise the error of an answer that has failed."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Give up the answers under way, and the episodes."""
        await cancel(*self._tasks.values())
        if self._answering is not None:
            await self._answering.close()

    async def _answer(self, group: OpenGroup, index: int) -> None:
        assert self._answering is not None
        group.answer(index, await self._answering.answer(group, index))
        self._answered(group)

    def _note(self, name: tuple[str, int], task: "asyncio.Task[None]") -> None:
        """Keep the error of an answer, which ends the dispatch."""
        del self._tasks[name]
        if not task.cancelled():
            self._error = self._error or task.exception()
            self._wake()
