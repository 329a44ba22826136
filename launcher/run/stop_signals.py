"""Handles Ctrl-C, SIGTERM and SIGHUP of the launcher: the first stops the run, the second kills it."""

import asyncio
import signal
from collections.abc import Callable

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """The stop signals of this process; a context manager, for the main thread, inside a running loop.

    Args:
        on_second: called at every signal after the first.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        # Under nohup, SIGHUP is ignored and has to stay so.
        self._numbers = [number for number in _NUMBERS if not (number == signal.SIGHUP and _is_ignored(number))]
        self._first: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> "StopSignals":
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def wait(self) -> signal.Signals:
        """Wait for the first signal."""
        return await asyncio.shield(self._first)

    def _received(self, number: signal.Signals) -> None:
        if self._first.done():
            self._on_second()
        else:
            self._first.set_result(signal.Signals(number))


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN
