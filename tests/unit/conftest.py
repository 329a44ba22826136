"""Unit tests are quick: each has 5 s, unless it says why it needs more."""

from pathlib import Path

import pytest

LIMIT_S = 5.0
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder their limit; pytest calls this with the tests of all folders."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
