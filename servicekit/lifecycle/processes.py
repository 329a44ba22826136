"""Child processes, from start to end: one, and several that end together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from servicekit.lifecycle.children import die_with_parent
from servicekit.lifecycle.exit_codes import EXIT_OK
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a child runs.

    Attributes:
        name: for logs.
        env: variables on top of ours.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A child process.

    Attributes:
        ended: its exit code, once it has ended; 128 + the signal's number if a signal ended it.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.pid = name, process.pid
        self._process = process
        self.ended: asyncio.Task[int] = asyncio.create_task(self._end(), name=f"wait {name}")

    @classmethod
    async def start(cls, program: Program, *, dies_with_us: bool = True, **options: Any) -> "Child":
        """Start the program.

        Args:
            dies_with_us: the kernel kills it when the thread that starts it ends.
            options: of subprocess.Popen; an env replaces ours and the program's.
        Raises: OSError: it cannot be started.
        """
        options = {"env": {**os.environ, **program.env}, **options}
        if dies_with_us:
            parent = os.getpid()
            options["preexec_fn"] = lambda: die_with_parent(parent)
        return cls(program.name, await asyncio.create_subprocess_exec(*program.command, **options))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):  # it is just ending
                # Process.send_signal would reap a process that has just ended, and `ended` would miss its exit code.
                os.kill(self.pid, number)

    async def _end(self) -> int:
        status = await self._process.wait()
        return status if status >= 0 else 128 - status


async def end(children: Sequence[Child], grace_s: float) -> None:
    """Send SIGTERM to all, and SIGKILL to those still running after grace_s; return when all have ended."""
    for number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
        if running := [child for child in children if not child.ended.done()]:
            for child in running:
                child.signal(number)
            await asyncio.wait([child.ended for child in running], timeout=timeout_s)


async def run_together(
    programs: Sequence[Program], stop: asyncio.Event, *, grace_s: float, alone_s: float = 0.0
) -> int:
    """Run programs that end together, on the main thread, in asyncio's own event loop: uvloop keeps SIGCHLD for itself.

    `stop` is set          SIGTERM to all; SIGKILL to those still running after grace_s
    one of them has ended  the others have alone_s to end by themselves; then the same

    A container's first process inherits orphans: they are reaped as they end.

    Returns: the exit code of the first that failed, 0 if none did. One that our SIGTERM ended has not failed: it was
        still importing, and had no handler yet.
    """
    children: list[Child] = []
    codes: list[int] = []
    asked = False

    def note(name: str, ended: "asyncio.Task[int]") -> None:
        if not ended.cancelled():
            codes.append(EXIT_OK if asked and ended.result() == 128 + signal.SIGTERM else ended.result())
            log.info("process ended", process=name, code=ended.result())

    try:
        for program in programs:
            # In its own group: Ctrl-C in a terminal reaches only us, and we pass it on once.
            child = await Child.start(program, process_group=0)
            child.ended.add_done_callback(partial(note, child.name))
            children.append(child)
        with _orphans_collected([child.pid for child in children]):
            first = await first_of({**{child.name: child.ended for child in children}, "stop": stop})
            if not stop.is_set():
                log.info("process ended, waiting for the others", process=first.name, seconds=alone_s)
                everyone = asyncio.wait([child.ended for child in children])
                await first_of({"all": everyone, "stop": stop}, timeout_s=alone_s)
            asked = True
            await end(children, grace_s)
    finally:
        await end(children, 0.0)
    return next((code for code in codes if code), EXIT_OK)


@contextlib.contextmanager
def _orphans_collected(ours: Sequence[int]) -> Iterator[None]:
    """Reap children that are not ours while the context is open."""

    def collect() -> None:
        for listed in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                for pid in map(int, listed.read_text().split()):
                    if pid not in ours:
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(pid, os.WNOHANG)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, collect)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
