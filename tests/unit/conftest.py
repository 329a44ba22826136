"""Unit tests are quick: each has 5 s of computing, unless it says why it needs more.

Seconds of the processor, not of the clock: a test that computes for 2 s must not fail because the machine is busy. The
clock has a limit too, for what waits or blocks.
"""

import time
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT_S = 5.0
CLOCK_LIMIT_S = 60.0
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder their limit; pytest calls this with the tests of all folders."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(CLOCK_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test that has computed for longer than its limit; its fixtures do not count."""
    start_s = time.process_time()
    result = yield
    used_s = time.process_time() - start_s
    marker = pyfuncitem.get_closest_marker("timeout")
    if marker is not None and marker.args[0] == CLOCK_LIMIT_S and used_s > LIMIT_S:
        pytest.fail(f"computed for {used_s:.1f} s: a unit test has {LIMIT_S:g} s, or a `timeout` marker that says why")
    return result
