"""Between the turns of a completion: an environment answers, and the completion continues after that, or has ended."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from servicekit.lifecycle.tasks import cancel
from tandem_clients.flow import Prompt
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


class Interacting(Protocol):
    """The environment of a run."""

    async def opened(self, prompts: Mapping[str, Prompt]) -> dict[str, Prompt]:
        """Put what the environment says first behind prompts, by group id; those that have it stay as they are."""
        ...

    def conversations(self) -> Answering:
        """Return the environments of a dispatch."""
        ...


async def opened(environments: Interacting | None, prompts: Mapping[str, Prompt]) -> Mapping[str, Prompt]:
    """Put what an environment, if there is one, says first behind prompts."""
    return prompts if environments is None else await environments.opened(prompts)


class Turns:
    """Answers under way.

    Args:
        environments: None: every completion has one turn.
        answered: called with a group of which a completion continues, or has ended.
        wake: called after each answer.
    """

    def __init__(
        self, environments: Interacting | None, answered: Callable[[OpenGroup], None], wake: Callable[[], None]
    ) -> None:
        self._answering = None if environments is None else environments.conversations()
        self._answered, self._wake = answered, wake
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
