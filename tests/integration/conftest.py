"""Service processes of a test's own."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kit.processes import Services


@pytest.fixture
def services(redis_server: str) -> Iterator[Services]:
    # Not tmp_path: receivers make Unix sockets below it, and a socket's path has at most 107 bytes.
    with TemporaryDirectory(prefix="sync-") as folder, Services(redis_server, Path(folder), "exact") as running:
        yield running
