"""Runs a background task tied to a step: started with it, cancelled if it is not done when the step ends."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from servicekit.lifecycle.tasks import cancel

T = TypeVar("T")


class BackgroundTask(AbstractAsyncContextManager["BackgroundTask[T]"], Generic[T]):
    """Work that begins when this is entered, and is cancelled if it is left before the work is done.

    Args:
        work: makes the coroutine; None: there is nothing to do.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]] | None = None) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __aenter__(self) -> "BackgroundTask[T]":
        """Begin the work."""
        if self._work is not None:
            self._task = asyncio.create_task(self._work(), name="meanwhile")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel the work, if it is not done."""
        if self._task is not None:
            await cancel(self._task)

    @property
    def has_work(self) -> bool:
        """Whether there is something to do."""
        return self._work is not None

    def tasks(self) -> "tuple[asyncio.Task[T], ...]":
        """Return the task that does the work; none: there is nothing to do."""
        return () if self._task is None else (self._task,)

    def check(self) -> None:
        """Raise the error of the work, if it has failed."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def result(self) -> T | None:
        """Wait until the work is done. Returns: its result; None: there was none to do. Raises: its error."""
        return None if self._task is None else await self._task
