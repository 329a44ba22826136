"""The examples in docstrings are true."""

import doctest
import importlib

import pytest

from tests.house.repository import PACKAGES, name_of, python_files

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = [
    name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for path in python_files(*PACKAGES, "tools", "examples")
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples() -> None:
    assert len(MODULES) >= 2
