"""Free memory is the least of what the host has and what the container may still take; caches count as free."""

from pathlib import Path

import pytest
import torch

from weightsync.transfer import spare

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8 GiB available and no cgroup."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(spare, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(spare, "_CGROUP", tmp_path)
    return tmp_path


def limit(folder: Path, text: str) -> None:
    """A container that uses 3 GiB, 1 GiB of it for files it could do without."""
    (folder / "memory.max").write_text(f"{text}\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon {2 * GIB}\nfile {GIB}\ninactive_file {GIB}\n")


def test_a_host_gives_what_is_available(machine: Path) -> None:
    assert spare.free_bytes(torch.device("cpu")) == 8 * GIB


@pytest.mark.parametrize(("text", "free"), [("max", 8), (str(4 * GIB), 2), (str(64 * GIB), 8)])
def test_a_container_gives_no_more_than_its_limit(machine: Path, text: str, free: int) -> None:
    limit(machine, text)
    assert spare.free_bytes(torch.device("cpu")) == free * GIB


def test_this_machine_has_some() -> None:
    assert spare.free_bytes(torch.device("cpu")) > 2**20
