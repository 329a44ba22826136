"""Starts processes under guards, waits for the first that ends, and stops them all."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.run import guard
from launcher.view.logs.lines import record_of
from servicekit.lifecycle.processes import Child, Program
from servicekit.lifecycle.tasks import first_of

# Time that a guard needs, after its grace period, to kill and reap the processes that are left.
_GUARD_MARGIN_S = 6.0
_KILLED = 128 + signal.SIGKILL
# End of a log in which the reason for the end of its process is looked for.
_TAIL_BYTES = 65536
# Longest reason: enough for a message that lists every problem, too little for a dump of a whole object.
_MAX_CHARACTERS = 2000
_BAD_LEVELS = ("error", "critical", "fatal")


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to run.

    Attributes:
        name: unique in the run; also the name of its log.
        stage: processes are stopped by descending stage, those of one stage together.
        env: variables that are added to the launcher's environment.
        unset: variables of the launcher's environment that the process does not get.
        grace_s: seconds from SIGTERM to SIGKILL.
        delay_s: seconds that its guard waits before it starts the process.
        remove: folder that is removed when the process ends.
    """

    name: str
    command: Sequence[str]
    log: Path
    stage: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    grace_s: float = 10.0
    delay_s: float = 0.0
    remove: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How a process ended; `code` is 128 + the signal's number if a signal ended it.

    Attributes:
        since: byte of its log where it began; earlier lines are of earlier processes.
    """

    name: str
    code: int
    log: Path
    since: int = 0

    def describe(self) -> str:
        """Describe the end, e.g. `rollout-0 exited with code 1: <last error of its log>`."""
        name = _signal_name(self.code)
        how = f"was ended by {name}" if name else f"exited with code {self.code}"
        reason = last_error(self.log, since=self.since, killed=bool(name))
        return f"{self.name} {how}" + (f": {reason}" if reason else "")


class Supervisor:
    """The processes of one run. Use it from the main thread: guards die with the thread that started them."""

    def __init__(self) -> None:
        self._specs: dict[str, ProcessSpec] = {}
        self._children: dict[str, Child] = {}
        self._waiters: dict[str, asyncio.Task[ProcessExit]] = {}
        # Held while a process is being started, so that `stop` never sees a half-started one.
        self._starting = asyncio.Lock()

    async def start(self, spec: ProcessSpec) -> None:
        """Start a process; its output is appended to its log.

        A cancelled call still finishes in the background, so that `stop` can end the process.

        Raises: ValueError: the name is taken; OSError: the guard cannot be started.
        """
        if spec.name in self._specs:
            raise ValueError(f"process name {spec.name!r} is taken")
        await self._starting.acquire()
        starting = asyncio.create_task(self._start(spec), name=f"start {spec.name}")
        starting.add_done_callback(lambda _: self._starting.release())
        await asyncio.shield(starting)

    async def _start(self, spec: ProcessSpec) -> None:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            since = log.seek(0, os.SEEK_END)
            child = await Child.start(
                Program(name=spec.name, command=_guarded(spec)),
                dies_with_us=False,  # the guard sees to it, and to what is below it
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: text for name, text in os.environ.items() if name not in spec.unset} | dict(spec.env),
                start_new_session=True,
            )
        self._specs[spec.name], self._children[spec.name] = spec, child
        self._waiters[spec.name] = asyncio.create_task(self._wait(spec, child, since), name=f"exit {spec.name}")

    def ended(self) -> list[ProcessExit]:
        """List the exits so far, without waiting."""
        return [waiter.result() for waiter in self._waiters.values() if waiter.done()]

    async def wait_any(self, ignore: Sequence[str] = ()) -> ProcessExit:
        """Wait for the first exit of a process whose name is not in `ignore`."""
        first = await first_of({name: waiter for name, waiter in self._waiters.items() if name not in ignore})
        ended: ProcessExit = first.value
        return ended

    @property
    def names(self) -> list[str]:
        """The processes, those that have ended included, until they are replaced or forgotten."""
        return list(self._specs)

    def forget(self, name: str) -> None:
        """Forget a process that has ended: its name is free again."""
        del self._specs[name], self._children[name], self._waiters[name]

    def pids(self, name: str) -> list[int]:
        """List the ids of a service's living processes, parents first, without its guard."""
        return guard.descendants(self._children[name].pid)

    def variable(self, name: str, variable: str) -> str:
        """Return an environment variable that a process was started with; "": none of that name was added."""
        return self._specs[name].env.get(variable, "")

    async def wait(self, name: str) -> ProcessExit:
        """Wait for the exit of a process."""
        return await asyncio.shield(self._waiters[name])

    async def stop(self) -> list[ProcessExit]:
        """Send SIGTERM stage by stage, highest first; every process has ended when this returns.

        Returns: exits of the processes that did not end on SIGTERM and were killed.
        """
        before = {ended.name for ended in self.ended()}
        async with self._starting:
            specs = list(self._specs.values())
        await self._stop_all(specs)
        return [ended for ended in self.ended() if ended.code == _KILLED and ended.name not in before]

    async def replace(self, specs: Sequence[ProcessSpec]) -> None:
        """Stop the processes of these names, as `stop` does, and start `specs` in their place. Raises: OSError."""
        await self._stop_all([self._specs[spec.name] for spec in specs])
        for spec in specs:
            self.forget(spec.name)
        for spec in specs:
            await self.start(spec)

    async def _stop_all(self, specs: Sequence[ProcessSpec]) -> None:
        for stage in sorted({spec.stage for spec in specs}, reverse=True):
            await asyncio.gather(*(self.end(spec.name) for spec in specs if spec.stage == stage))

    def kill(self, *names: str) -> None:
        """Kill processes, without names all, without a grace period. `stop` must still be awaited to reap all."""
        for name in names or self._specs:
            self._children[name].signal(signal.SIGUSR1)

    async def _wait(self, spec: ProcessSpec, child: Child, since: int) -> ProcessExit:
        code = await asyncio.shield(child.ended)
        if spec.remove is not None:
            # The guard does this too, in case the launcher dies; but a signal may end the guard before it handles any.
            shutil.rmtree(spec.remove, ignore_errors=True)
        return ProcessExit(name=spec.name, code=code, log=spec.log, since=since)

    async def end(self, name: str) -> None:
        """End a process: SIGTERM, and SIGKILL after its grace period."""
        child = self._children[name]
        child.signal(signal.SIGTERM)
        _, pending = await asyncio.wait([self._waiters[name]], timeout=self._specs[name].grace_s + _GUARD_MARGIN_S)
        if pending:
            # The guard itself hangs (stopped, or out of memory): end its group without its help.
            for pid in guard.descendants(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            child.signal(signal.SIGKILL)
            await self._waiters[name]


def _guarded(spec: ProcessSpec) -> list[str]:
    options = ["--parent", str(os.getpid()), "--grace-s", str(spec.grace_s), "--delay-s", str(spec.delay_s)]
    if spec.remove is not None:
        options += ["--remove", str(spec.remove)]
    return [sys.executable, "-I", "-S", str(Path(guard.__file__).absolute()), *options, "--", *spec.command]


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def last_error(log: Path, *, since: int = 0, killed: bool = False) -> str:
    """Find the last JSON record of level error or worse, else the log's last line.

    A traceback after that record is preferred to it: it ended the process.

    Args:
        since: byte of the log where the process began; earlier lines are of earlier processes.
        killed: a signal ended the process, so only an error record counts, not the last line.
    Returns: one line of at most 2,000 characters; "" for an empty or missing log.
    """
    lines = _tail(log, since)
    for index in range(len(lines) - 1, -1, -1):
        record = record_of(lines[index])
        if record is not None and str(record.get("level", "")).lower() in _BAD_LEVELS:
            trailing = [line for line in lines[index + 1 :] if record_of(line) is None]
            return _short(trailing[-1] if any("Traceback" in line for line in trailing) else _readable(record))
    return _short(_readable(record_of(lines[-1]) or lines[-1])) if lines and not killed else ""


def _tail(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _readable(record: dict[str, Any] | str) -> str:
    if isinstance(record, str):
        return record
    details = [str(record[key]) for key in ("error", "reason", "detail") if record.get(key)]
    exception = str(record.get("exception", "")).strip().splitlines()
    headline = str(record.get("message", record.get("event", "")))
    return ": ".join(part for part in (headline, *(details or exception[-1:])) if part)


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
