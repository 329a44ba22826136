"""The house's own scanner sees what it has to see."""

import ast

from tests.house import repository


def test_calls_are_named_through_their_imports() -> None:
    imports = "import time as t\nfrom asyncio import sleep as nap\nimport torch.distributed\n"
    tree = ast.parse(imports + "t.sleep(1)\nnap(2)\ntorch.save(3)")
    assert [name for name, _ in repository.calls(tree)] == ["time.sleep", "asyncio.sleep", "torch.save"]


def test_the_repository_is_listed() -> None:
    names = {repository.name_of(path) for path in repository.files()}
    assert {"pyproject.toml", "Makefile", "tests/house/repository.py"} <= names
    assert not any(name.startswith(".venv/") for name in names)


def test_every_package_is_there() -> None:
    for package in repository.PACKAGES:
        assert (repository.REPO / package / "__init__.py").is_file(), package
