"""Waiting for a condition that nothing announces: the only place where tests sleep."""

import time
from collections.abc import Callable

_INTERVAL_S = 0.01


def until(condition: Callable[[], bool], timeout_s: float = 10.0, *, interval_s: float = _INTERVAL_S) -> None:
    """Returns once the condition holds. Raises: AssertionError: it does not within the time.

    Args:
        interval_s: between looks; longer where a look starts a process, to leave the cores to what is waited for.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"the condition did not come true within {timeout_s:g} s")
        time.sleep(interval_s)


def throughout(condition: Callable[[], bool], duration_s: float) -> None:
    """Raises: AssertionError: the condition fails to hold at a look within the time."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        if not condition():
            raise AssertionError(f"the condition ceased to hold within {duration_s:g} s")
        time.sleep(_INTERVAL_S)
