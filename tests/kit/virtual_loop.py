"""An event loop whose time jumps to the next timer: hours of waiting take milliseconds, and a deadlock is an error."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready, and no timer runs."""


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: time that would be waited for has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; what is not asyncio's (threads, sockets of others) must not be waited for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. Raises: its error; Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
