"""Unit tests are quick: one that computes for more than 5 s is named in pytest's warnings, unless it says why it does.

Said, not failed: the processor seconds that a virtual machine counts vary three-fold with what its host does beside it,
so a limit on them would fail a run for the machine it is on. The clock has a limit, for what waits or blocks.
"""

import time
import warnings
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
    """Name a test that has computed for longer than its limit; its fixtures do not count."""
    start_s = time.process_time()
    result = yield
    used_s = time.process_time() - start_s
    marker = pyfuncitem.get_closest_marker("timeout")
    if marker is not None and marker.args[0] == CLOCK_LIMIT_S and used_s > LIMIT_S:
        warnings.warn(f"computed for {used_s:.1f} s, a unit test has {LIMIT_S:g} s: {pyfuncitem.nodeid}", stacklevel=1)
    return result
