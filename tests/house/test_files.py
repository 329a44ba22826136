"""Committed files hold no machine paths, no registry hosts, and nothing large by accident."""

import re
from pathlib import Path

import pytest

from tests.house.repository import files, name_of

# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9_.])/(wor[k]|far[m]|roo[t])/")
REGISTRY_HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "registry.npmjs" + ".org", "download.pytorch" + ".org")
# The largest is the model of examples/calculator.
MAX_FILE_BYTES = 5 * 1024 * 1024 // 2


def text_lines(path: Path) -> list[str]:
    """Returns the lines of a text file, none of a binary one."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def test_no_machine_paths() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:120]}"
        for path in files()
        for number, line in enumerate(text_lines(path), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_no_registry_hosts() -> None:
    found = [
        f"{name_of(path)}:{number}: {host}"
        for path in files()
        for number, line in enumerate(text_lines(path), 1)
        for host in REGISTRY_HOSTS
        if host in line
    ]
    assert found == []


def test_no_large_files() -> None:
    large = {name_of(path): path.stat().st_size for path in files() if path.stat().st_size > MAX_FILE_BYTES}
    assert large == {}


@pytest.mark.parametrize("line", ["cd /wor" + "k/x", 'path = "/roo' + 't/.cache"'])
def test_a_machine_path_is_recognised(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize("line", ["a/wor" + "k/b", "see docs/roo" + "t/x"])
def test_a_relative_path_is_not(line: str) -> None:
    assert not MACHINE_PATH.search(line)
