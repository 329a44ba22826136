"""An event loop whose time jumps to the next timer: hours of waiting take milliseconds, and a deadlock is an error."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready, and no timer runs."""


class _Jumping(selectors.DefaultSelector):  # of select() descriptors end at 1,023
    """Waits for nothing: time that would be waited for has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock
        if not ready and timeout:
            self.now_s += timeout
        return ready


class Inline(Executor):
    """Does what it is given in the caller's thread: virtual time waits for no other."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Do it now."""
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the future's
            done.set_exception(error)
        return done


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; sockets of other processes must not be waited for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run it now."""
        return asyncio.wrap_future(Inline().submit(func, *args), loop=self)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. Raises: its error; Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def passed(seconds: float) -> None:
    """Let virtual seconds pass."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()
