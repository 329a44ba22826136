"""Ties ranks to their service: signals, and a watch over child processes."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from servicekit.lifecycle.children import die_with_parent

SERVICE_PID = "TANDEM_SERVICE_PID"

# A spawned rank imports this module first, for `run_rank`; then its arguments bring SGLang's imports, of whose time
# garbage collection takes a quarter.
if "--multiprocessing-fork" in sys.orig_argv:
    gc.disable()


def run_rank(*arguments: Any) -> None:
    """Be one of SGLang's ranks. Args: arguments: of SGLang's run_scheduler_process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments)


def bind_to_service() -> None:
    """Make a rank die with the service, and ignore Ctrl-C and SIGTERM, which a terminal sends to the whole group.

    SGLang sets the parent-death signal too, but only after seconds of imports; a service killed before that would
    leave ranks behind.
    """
    service = os.environ.get(SERVICE_PID)
    die_with_parent(os.getppid() if service is None else int(service))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def ignore_launch_failure(signum: int, frame: FrameType | None) -> None:
    """Ignore SIGQUIT of a rank that fails during start-up: the start itself raises, with the rank's exit code.

    SGLang's own handler would kill this process without a message.
    """


class ChildWatch:
    """Calls `on_death(pid, how)` on the event loop when one of the processes ends. Linux (pidfd)."""

    def __init__(self, pids: list[int], on_death: Callable[[int, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        for pid in pids:
            descriptor = os.pidfd_open(pid)
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, self._died, descriptor, pid, on_death)

    def stop(self) -> None:
        """Stop watching; call it before the processes are ended on purpose."""
        for descriptor in self._descriptors:
            self._forget(descriptor)
        self._descriptors = []

    def _died(self, descriptor: int, pid: int, on_death: Callable[[int, str], None]) -> None:
        self._loop.remove_reader(descriptor)
        on_death(pid, _exit_reason(descriptor))

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


def _exit_reason(descriptor: int) -> str:
    """Describe how a child ended, e.g. "SIGKILL" or "exit code 1", without reaping it."""
    with contextlib.suppress(ChildProcessError):  # reaped already
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return signal.Signals(ended.si_status).name if by_signal else f"exit code {ended.si_status}"
    return "unknown cause"
