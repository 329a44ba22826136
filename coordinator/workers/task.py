"""What workers do: a task as the coordinator describes it, the work that a worker makes of it, an answer."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Memory in which a worker says what it does: 1 + the place of a job.
DOING_BYTES = 8
# For importing sympy on a busy host.
_START_TIMEOUT_S = 60.0
# Clock time for a job's CPU time: on a busy host a worker gets only a part of a core.
_SLACK_FACTOR, _SLACK_S = 10.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task for worker processes.

    Attributes:
        name: a name in tasks.TASKS.
        settings: arguments of that task (JSON).
        timeout_s: seconds that a job may take.
        wall_clock: whether that is by the clock, because a job may wait; else seconds of the CPU.
        start_timeout_s: seconds until a worker is ready.
        memory_mib: data that a worker may allocate; sympy maps less than half a GiB.
        window: jobs sent to a worker ahead of their answers: it need not wait for the next one.
        concurrency: jobs that a worker does at a time, if the work is a coroutine.
        output: name that is logged with what a worker prints; "": that is discarded.
        kind: what has that name.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float
    wall_clock: bool = False
    start_timeout_s: float = _START_TIMEOUT_S
    memory_mib: int = 4096
    window: int = 64
    concurrency: int = 1
    output: str = ""
    kind: str = "reward"

    @property
    def silence_s(self) -> float:
        """Seconds by the clock after which a worker that has not answered is frozen."""
        return self.timeout_s + _SLACK_S if self.wall_clock else _SLACK_FACTOR * self.timeout_s + _SLACK_S


def by_type_and_place(error: BaseException) -> str:
    """Describe an error without its message, which may quote a completion."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The code of a task, loaded in a worker.

    Attributes:
        call: does a job (JSON in and out); a coroutine function if `is_async`.
        form: what the coordinator must know about it (JSON).
        describe: makes the text of an error.
    """

    call: Callable[[Any], Any]
    is_async: bool = False
    form: Mapping[str, Any] = field(default_factory=dict)
    describe: Callable[[BaseException], str] = by_type_and_place


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of one job: a value (JSON), or late, or an error, or not tried since too many before it failed."""

    value: Any = None
    late: bool = False
    error: str = ""
    tried: bool = True
    # By the worker's clock; 0.0 if it did not say.
    seconds: float = field(default=0.0, compare=False)

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.late or self.error != "" or not self.tried
