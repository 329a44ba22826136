"""Waiting for a condition that nothing announces: the only place where tests sleep."""

import time
from collections.abc import Callable

_INTERVAL_S = 0.01


def until(
    condition: Callable[[], object],
    timeout_s: float = 10.0,
    what: str = "the condition",
    *,
    interval_s: float = _INTERVAL_S,
) -> None:
    """Return once the condition holds.

    Args:
        what: names the condition in the error.
        interval_s: between checks; longer where a check starts a process, which would take the cores from others.

    Raises:
        AssertionError: it does not hold within the time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {timeout_s:g} s")
        time.sleep(interval_s)


def throughout(condition: Callable[[], bool], duration_s: float) -> None:
    """Check the condition for a while. Raises: AssertionError: it did not hold at one of the checks."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        if not condition():
            raise AssertionError(f"the condition ceased to hold within {duration_s:g} s")
        time.sleep(_INTERVAL_S)
