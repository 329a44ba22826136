"""A process that works on texts with code that may take for ever: a user's pattern, sympy.

    python -m coordinator.learn.rewards.worker TASK SETTINGS TIMEOUT_S PARENT_PID

Lines of JSON on stdin and stdout: one `{"ready": true}`, then an answer for each job, in order. An answer is one of
`{"value": ...}`, `{"late": true}` and `{"error": "..."}`. Nothing of a text is written anywhere else: errors are named
by their type and place, and stderr goes nowhere.
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
# Should a bare `except:` have swallowed the first signal.
_AGAIN_S = 0.1
# For C code, which no Python signal interrupts: this much later the kernel ends the process (SIGXCPU).
_KILLED_AFTER_S = 1


class _Late(BaseException):
    """Not an Exception: libraries catch those and would go on."""


class _Timer:
    """Raises `_Late` in the main thread after some seconds *of this process's own CPU time*.

    A busy host must not turn right answers into zeros; whoever waits for the answer watches the clock.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed = False
        signal.signal(signal.SIGPROF, self._ring)

    def run(self, work: Callable[[], Any]) -> dict[str, Any]:
        """The answer that `work` gives, at the latest when its time is over."""
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
    """Type and place, not the message: that may quote a completion."""
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
        _say({"error": f"{type(error).__name__}: {error}"})
        return
    timer = _Timer(float(timeout_s))
    _say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _say(timer.run(lambda: work(job)))  # noqa: B023 (called at once)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
