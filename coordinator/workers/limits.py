"""Runs in a worker. Limits the time and the memory of users' code that does not check them itself."""

import gc
import math
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# Interval at which the signal repeats, in case a bare `except:` has swallowed the first one.
_AGAIN_S = 0.1
# C code is not interrupted by Python's signal handlers: this much later the kernel ends the process (SIGXCPU).
_KILLED_AFTER_S = 1
# Share of the memory that a process may allocate. With more in use after a MemoryError, later calls would raise it too.
_FULL = 0.5


class Late(BaseException):
    """A job's time is over. Not an Exception: libraries catch those and would continue."""


class CpuTimer:
    """Raises `Late` in the main thread after some seconds *of this process's own CPU time*.

    CPU time, because a busy host must not turn right answers into zeros; the coordinator watches the clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed = False
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, self._ring)

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns."""
        cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s + self._timeout_s) + _KILLED_AFTER_S, most))
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_PROF, self._timeout_s, _AGAIN_S)
            return call()
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise Late


class WallTimer:
    """Raises `Late` in the main thread after some seconds by the clock, also while it waits.

    A thread looks at the clock, so that SIGALRM stays free for the code that is called (math-verify uses it).
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = math.inf
        signal.signal(signal.SIGPROF, self._ring)
        threading.Thread(target=self._look, args=(threading.get_ident(),), name="deadline", daemon=True).start()

    def run(self, call: Callable[[], Any], within_s: float | None = None) -> Any:
        """Return what the call returns. within_s: its seconds; None: those of the constructor."""
        try:
            self._deadline = time.monotonic() + (self._timeout_s if within_s is None else within_s)
            return call()
        finally:
            self._deadline = math.inf

    def _look(self, thread: int) -> None:
        pause_s = min(_AGAIN_S, self._timeout_s / 4)
        while True:
            time.sleep(pause_s)
            if time.monotonic() > self._deadline:
                signal.pthread_kill(thread, signal.SIGPROF)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._deadline:
            raise Late


Timer = CpuTimer | WallTimer


def limit_memory(mebibytes: int) -> None:
    """Let further allocations beyond this raise MemoryError: data, not the libraries' code, which is mapped as well."""
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes << 20, mebibytes << 20))


def relieve(error: BaseException) -> None:
    """Free what the code held that raised it, if it is a MemoryError; end a process whose memory stays used up."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        if used > _FULL * resource.getrlimit(resource.RLIMIT_DATA)[0]:
            os.kill(os.getpid(), signal.SIGKILL)
