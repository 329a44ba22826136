"""A worker process for code that may run forever on a text: a user's pattern, sympy.

    python -m coordinator.learn.rewards.worker TASK SETTINGS TIMEOUT_S PARENT_PID

Lines of JSON on stdin and stdout: one `{"ready": true}`, then an answer for each job, in order. An answer is one of
`{"value": ...}`, `{"late": true}` and `{"error": "..."}`. Texts are written nowhere else: an error consists of its type
and place in the code, and stderr is discarded.
"""

import json
import logging
import math
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from coordinator.learn.rewards import tasks
from servicekit.life.children import die_with_parent

# One expression must not take the host's memory with it; sympy itself maps less than half a GiB.
_MEMORY_BYTES = 4 << 30
# Interval at which the timer signal repeats, in case a bare `except:` has swallowed the first one.
_AGAIN_S = 0.1
# C code is not interrupted by Python's signal handlers: this much later the kernel ends the process (SIGXCPU).
_KILLED_AFTER_S = 1


class _Late(BaseException):
    """A job's CPU time is over. Not an Exception: libraries catch those and would continue."""


class _Timer:
    """Raises `_Late` in the main thread after some seconds *of this process's own CPU time*.

    CPU time, since a busy host must not turn right answers into zeros; the parent watches the clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed = False
        signal.signal(signal.SIGPROF, self._ring)

    def run(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Run `work`. Returns: its answer; late or an error, if it does not finish in time or raises."""
        cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s + self._timeout_s) + _KILLED_AFTER_S, most))
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_PROF, self._timeout_s, _AGAIN_S)
                value = work()
            finally:
                self._armed = False
        except _Late:
            self._armed = False
            return {"late": True}
        except Exception as error:  # noqa: BLE001 - the boundary of one job: the parent counts it
            return {"error": _named(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"value": value}

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise _Late


def _named(error: BaseException) -> str:
    """Describe an error by type and place, without its message, which may quote a completion."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


def main() -> None:
    """Serve until stdin ends."""
    task, settings, timeout_s, parent = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the coordinator
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # math-verify would log the completion
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    try:
        work = tasks.TASKS[task](**json.loads(settings))
    except Exception as error:  # noqa: BLE001 - no completion is in it yet
        _write_answer({"error": f"{type(error).__name__}: {error}"})
        return
    timer = _Timer(float(timeout_s))
    _write_answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _write_answer(timer.run(lambda: work(job)))  # noqa: B023 (called in this iteration)


def _write_answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
