"""Folders of processes that were killed go at the next start; those of living ones and of others stay."""

import signal
import subprocess
import sys
import uuid
from pathlib import Path

from servicekit.lifecycle.temporary import OwnedFolder, remove_orphans
from tests.kit.processes import Services

OWNER = """
import os, sys
from pathlib import Path
from servicekit.lifecycle.temporary import OwnedFolder, shared_memory_of
owned = OwnedFolder("tdm", sys.argv[1])
opened = [open(name) for name in sys.argv[2:]]
gone, elsewhere = Path("/dev/shm/sgl_gone"), map(Path, sys.argv[2:3])
owned.note([gone, *elsewhere, *shared_memory_of([os.getpid()], "sglang_loads_test_", "sgl_shm_test_")])
print(owned.path, flush=True)
sys.stdin.read()
"""


def owner(parent: Path, *opened: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder of its own."""
    command = [sys.executable, "-c", OWNER, str(parent), *map(str, opened)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    loads, queue, other = (
        Path(f"/dev/shm/{kind}_test_{uuid.uuid4().hex}") for kind in ("sglang_loads", "sgl_shm", "tandem")
    )
    elsewhere = tmp_path / "thesis.txt"
    for file in (loads, queue, other, elsewhere):
        file.touch()
    process, folder = owner(tmp_path, elsewhere, loads, queue, other)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert remove_orphans("tdm", tmp_path) == []
    process.kill()
    process.wait(timeout=10)
    assert remove_orphans("tdm", tmp_path) == [folder]
    assert not folder.exists()
    assert [file.exists() for file in (loads, queue, other, elsewhere)] == [False, False, True, True]
    other.unlink()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "tdm-of-somebody").mkdir()
    (tmp_path / "tdm-link").symlink_to(tmp_path / "tdm-of-somebody")
    (tmp_path / "tdm-file").touch()
    assert remove_orphans("tdm", tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    owned = OwnedFolder("tdm", tmp_path)
    owned.remove()
    owned.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_a_test_kills_leaves_no_semaphore(tmp_path: Path) -> None:
    script = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        file = Path(f"/dev/shm/sem.{process.stdout.readline().decode().strip().removeprefix('/')}")
        assert file.exists()
        Services("", tmp_path, "t", processes={"service": process}).kill("service")
        assert process.returncode == -signal.SIGKILL
        assert not file.exists()
