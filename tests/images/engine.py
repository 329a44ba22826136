"""A Docker engine for tests: the one of this machine, or one of our own that goes away with its data."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house.repository import REPO
from tests.kit.waiting import until

READY_S = 60.0
STOP_S = 60.0
BOOTSTRAP_S = 1200.0
# What a base image needs; the official Python image has it too.
BASE_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
# Survives a test run: making it takes a minute and a mirror of Debian.
BASE_ARCHIVE = REPO / ".cache" / "images" / "debian-python.tar"


class Unavailable(Exception):
    """There is no Docker to test with; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine and the command that speaks to it.

    Attributes:
        docker: the command; it knows BuildKit.
        host: for DOCKER_HOST; "" for the default.
    """

    docker: str
    host: str

    @property
    def environ(self) -> dict[str, str]:
        """The environment of commands that use it."""
        return {**os.environ, **({"DOCKER_HOST": self.host} if self.host else {}), "DOCKER": self.docker}

    def run(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """`docker ARGUMENTS`. Returns: its output. Raises: AssertionError: it failed; with what it said."""
        return checked([self.docker, *arguments], self.environ, timeout_s)

    def obtain(self, image: str) -> str:
        """Makes sure that the engine has an image, if it can. Returns: where it came from; "": it cannot be had."""
        with contextlib.suppress(AssertionError):
            self.run("image", "inspect", image)
            return "the engine had it"
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("pull", "--quiet", image)
            return "pulled"
        return ""

    def answers(self) -> bool:
        """Whether it is there."""
        done = subprocess.run([self.docker, "version"], env=self.environ, capture_output=True, check=False)
        return done.returncode == 0


def checked(command: Sequence[str], environ: dict[str, str], timeout_s: float) -> str:
    """Runs a command in the repository. Raises: AssertionError: it failed; with the end of what it said."""
    done = subprocess.run(
        command, env=environ, cwd=REPO, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}"
    return done.stdout


def find_docker() -> str:
    """A docker command that can build with BuildKit. Raises: Unavailable."""
    candidates = [
        str(path)
        for folder in os.get_exec_path()
        if (path := Path(folder) / "docker").is_file() and os.access(path, os.X_OK)
    ]
    for docker in candidates:
        found = subprocess.run(
            [docker, "build", "--help"], env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True
        )
        if found.returncode == 0 and "--secret" in found.stdout:
            return docker
    raise Unavailable(f"no docker command with BuildKit on PATH (found: {', '.join(candidates) or 'none'})")


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """This machine's engine if it answers, else one of our own. Raises: Unavailable."""
    docker = find_docker()
    given = Engine(docker=docker, host=os.environ.get("DOCKER_HOST", ""))
    if given.answers():
        yield given
        return
    if given.host:
        raise Unavailable(f"DOCKER_HOST={given.host} does not answer")
    if shutil.which("dockerd") is None:
        raise Unavailable("no Docker engine answers, and there is no dockerd to start one with")
    if os.geteuid() != 0:
        raise Unavailable("no Docker engine answers, and only root can start one")
    with _own_engine(docker) as started:
        yield started


@contextlib.contextmanager
def _own_engine(docker: str) -> Iterator[Engine]:
    # Not tmp_path: the path of a socket may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tandem-docker-"))
    command = ["dockerd", "--host", f"unix://{folder}/docker.sock", "--data-root", f"{folder}/data"]
    command += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/dockerd.pid", "--mtu", "1400"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        started = Engine(docker=docker, host=f"unix://{folder}/docker.sock")
        with contextlib.suppress(AssertionError):
            until(lambda: daemon.poll() is not None or started.answers(), READY_S)
        if not started.answers():
            raise Unavailable(f"dockerd does not start here: {(folder / 'log').read_text(errors='replace')[-600:]}")
        yield started
    finally:
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(STOP_S)
        daemon.kill()
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def provide_base(docker: Engine, name: str) -> str:
    """Makes sure that the engine has the base image: its own, pulled, or made from Debian packages under that name.

    Returns: where it came from. Raises: Unavailable.
    """
    if source := docker.obtain(name):
        return source
    if not BASE_ARCHIVE.is_file():
        _bootstrap(BASE_ARCHIVE)
    docker.run("import", "--change", 'CMD ["python3"]', str(BASE_ARCHIVE), name, timeout_s=300)
    return "made from Debian packages"


def _bootstrap(archive: Path) -> None:
    """A minimal Debian with Python, as slim as the official image: without documentation, caches and lists."""
    if shutil.which("debootstrap") is None:
        raise Unavailable("no base image can be pulled, and there is no debootstrap to make one with")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
        root = Path(folder) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOOTSTRAP_S, check=False)
        if done.returncode != 0:
            raise Unavailable(f"debootstrap failed: {(done.stdout + done.stderr)[-600:]}")
        for unwanted in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / unwanted, ignore_errors=True)
        (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
        unfinished = archive.with_suffix(".unfinished")
        subprocess.run(["tar", "-C", str(root), "-cf", str(unfinished), "."], check=True, timeout=BOOTSTRAP_S)
        unfinished.replace(archive)
