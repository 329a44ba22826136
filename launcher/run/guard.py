"""Runs one service and leaves no process of it behind: not its children, not if the launcher is killed.

    python -I -S guard.py --parent PID --grace-s S [--delay-s S] [--remove FOLDER] -- COMMAND ...

The launcher starts one guard per service, each in a session of its own, so that a Ctrl-C reaches the launcher only.

| event                                      | what the guard does                                              |
|--------------------------------------------|------------------------------------------------------------------|
| SIGTERM, SIGINT                            | SIGTERM to the service; after the grace period SIGKILL to all    |
| the launcher has ended (PR_SET_PDEATHSIG)  | the same                                                         |
| SIGUSR1                                    | SIGKILL to all, without a grace period                           |
| the service has ended                      | SIGKILL to the processes it left behind, then exit with its code |

"All" is every descendant, whatever session it moved to: the guard is their subreaper, so orphans become its children.
Standard library only, and no import of this project: it starts in 20 ms and cannot fail with the service.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# The kernel needs microseconds to end a process that was killed, so this is hardly ever waited for.
_POLL_S = 0.02


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def descendants(root: int) -> list[int]:
    """List the living processes below process id `root`, parents before children, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            # The command name is in parentheses and may hold spaces and parentheses itself.
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, [])]
        found += frontier
    return found


def kill_descendants(deadline_s: float = 5.0) -> bool:
    """Send SIGKILL to every descendant of this process until none is left; False if some outlive the deadline."""
    deadline = time.monotonic() + deadline_s
    while alive := descendants(os.getpid()):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class Guard:
    """Runs one service, forwards signals to it and cleans up after it.

    Args:
        command: of the service.
        parent: process id of the launcher.
        grace_s: seconds from SIGTERM to SIGKILL.
        delay_s: seconds before the service starts.
    """

    def __init__(self, command: list[str], *, parent: int, grace_s: float, delay_s: float) -> None:
        self._command, self._parent, self._grace_s, self._delay_s = command, parent, grace_s, delay_s
        self._service: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the service to its end. Returns: its exit code, or 128 + the signal that ended it."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop())
        signal.signal(signal.SIGUSR1, lambda *_: self._kill())
        signal.signal(signal.SIGALRM, lambda *_: self._kill())
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._parent:
            return 0  # the launcher died before it could be watched
        if not self._wait():
            return 128 + signal.SIGTERM
        code = self._run_service()
        kill_descendants()
        return code

    def _wait(self) -> bool:
        """Wait until the service is to start. Returns: whether it is; False: a stop signal came first."""
        start_s = time.monotonic() + self._delay_s
        while time.monotonic() < start_s and not self._stopping:
            time.sleep(_POLL_S)
        return not self._stopping

    def _run_service(self) -> int:
        try:
            self._service = subprocess.Popen(self._command, preexec_fn=_die_with_parent(os.getpid()))
        except OSError as error:
            print(f"cannot start {self._command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return 127
        if self._stopping:  # the signal came between fork and the assignment above
            self._stop()
        code = self._service.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return code if code >= 0 else 128 - code

    def _stop(self) -> None:
        first, self._stopping = not self._stopping, True
        if self._service is not None and self._service.returncode is None:
            self._service.terminate()
            if first or signal.getitimer(signal.ITIMER_REAL)[0] == 0.0:
                signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _kill(self) -> None:
        self._stopping = True
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _die_with_parent(guard: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    return prepare


def main() -> int:
    """Run the guard process. Returns: its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--remove", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        guard = Guard(command, parent=options.parent, grace_s=options.grace_s, delay_s=options.delay_s)
        return guard.run()
    finally:
        if options.remove:
            shutil.rmtree(options.remove, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
