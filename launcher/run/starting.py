"""How processes start and end on this machine, with a line for the user: the same for a run and for an evaluation.

Ctrl-C, SIGTERM and SIGHUP of the launcher: the first stops the run, the second kills it.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.run import redis_server
from launcher.run.supervisor import ProcessSpec, Supervisor
from launcher.view.run_view import RunView

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def start_redis(redis_url: str | None, run_dir: Path, supervisor: Supervisor, view: RunView) -> str:
    """Start a Redis server if there is none. Returns: its URL. Raises: TandemError, OSError: it cannot be started."""
    if redis_url is not None:
        return redis_url
    view.doing("starting Redis")
    spec, url = redis_server.server_spec(run_dir / "logs" / "redis.log")
    await supervisor.start(spec)
    await redis_server.wait_ready(url, supervisor)
    return url


async def start_services(specs: Sequence[ProcessSpec], run_dir: Path, supervisor: Supervisor, view: RunView) -> None:
    """Start processes. Raises: OSError: one cannot be started."""
    view.print_line(f"starting {', '.join(spec.name for spec in specs)}; logs in {run_dir / 'logs'}")
    for spec in specs:
        await supervisor.start(spec)


async def stop_services(supervisor: Supervisor, view: RunView) -> None:
    """End all processes, and close the view."""
    view.doing("stopping services")
    for ended in await supervisor.stop():
        view.warning(f"{ended.name} did not end on SIGTERM and was killed; log: {ended.log}")
    view.close()


class StopSignals:
    """The stop signals of this process; a context manager, for the main thread, inside a running loop.

    Args:
        on_second: called at every signal after the first.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        # Under nohup, SIGHUP is ignored and has to stay so.
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._numbers = [number for number in _NUMBERS if not (number == signal.SIGHUP and ignored)]
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
