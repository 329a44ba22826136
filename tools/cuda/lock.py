"""Writes requirements/cuda-*.txt and torch-cuda.txt: all packages that are installed for NVIDIA GPUs.

    python -m tools.cuda.lock write     after a change of pyproject.toml or of the lock; asks the package index
    python -m tools.cuda.lock check     reports files that no longer satisfy pyproject.toml

uv resolves them from the package index for the given Python, without this machine's settings of pip. The versions of
the CPU's lock are preferred where SGLang's requirements allow them.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from tools.check_venv import read_pins

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "requirements"
PYTHONS = ("3.11", "3.12")
# glibc 2.34 (Debian 12, Ubuntu 22.04): what SGLang's own wheel is built for.
PLATFORM = "x86_64-manylinux_2_34"
RESOLVE_S = 300.0
# Extras that no lock holds: libraries of environments. Verifiers asks for another `openai` than SGLang.
ENVIRONMENTS = ("gymnasium", "openenv", "reasoning-gym", "textarena", "verifiers")
_BY = "# Written by `python -m tools.cuda.lock write`.\n"
# Prefixes of a machine's own settings of pip and uv; certificates stay, because the index needs them.
_SETTINGS = ("PIP_", "UV_")
_KEPT = ("PIP_CERT", "UV_CACHE_DIR")


class Unreachable(Exception):
    """The package index does not answer."""


class Unresolvable(Exception):
    """No set of versions fits; the message is uv's explanation."""


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A file of pins.

    Attributes:
        header: comment lines of the file.
        asked: requirement lines to resolve.
        python: the version to resolve for.
        constraints: files whose versions are binding.
        left_out: packages that are in other files, and so not in this one.
    """

    header: str
    asked: tuple[str, ...]
    python: str
    constraints: tuple[Path, ...] = ()
    left_out: frozenset[str] = frozenset()


def locks() -> dict[str, Lock]:
    """Return the locks by the name of their file."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for name, extra in project["optional-dependencies"].items():
        asked += [] if name in ENVIRONMENTS else extra
    found = {
        f"cuda-{python}.txt": Lock(
            header=f"# Everything for NVIDIA GPUs on Python {python}, torch included; see gpu.md.\n",
            asked=tuple(asked),
            python=python,
        )
        for python in PYTHONS
    }
    lock = FOLDER / "lock.txt"
    found["torch-cuda.txt"] = Lock(
        header="# What PyPI's build of torch needs beyond the lock: constraints; a build for CPUs needs none of it.\n",
        asked=tuple((FOLDER / "torch.txt").read_text(encoding="utf-8").splitlines()),
        python="3.11",
        constraints=(lock,),
        left_out=frozenset(canonicalize_name(name) for name in [*read_pins(lock), "torch"]),
    )
    return found


def bare_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without this machine's settings of pip and uv, as on a fresh machine."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_SETTINGS)}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}


def uv(*arguments: str, given: str = "") -> str:
    """Run uv in a bare environment. Returns: its output. Raises: Unreachable, Unresolvable."""
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    environ = bare_environment(os.environ)
    done = subprocess.run(
        command, input=given, env=environ, cwd=REPO, capture_output=True, text=True, timeout=RESOLVE_S, check=False
    )
    if done.returncode == 0:
        return done.stdout
    if "error sending request" in done.stderr or "Network connectivity" in done.stderr:
        raise Unreachable(f"the package index does not answer:\n{done.stderr[-800:]}")
    raise Unresolvable(f"uv {arguments[0]} failed:\n{done.stderr}")


def resolve(lock: Lock, preferred: Mapping[str, str]) -> str:
    """Resolve a lock, with the preferred versions where they fit.

    Returns: the text of the file.
    Raises: Unreachable, Unresolvable.
    """
    options = ["--python-version", lock.python, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    options += ["--no-header", "--no-annotate", "--quiet"]
    for path in lock.constraints:
        options += ["--constraints", str(path)]
    with tempfile.TemporaryDirectory(prefix="tandem-lock-") as folder:
        output = Path(folder) / "pins.txt"
        output.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()), encoding="utf-8")
        uv("pip", "compile", *options, "--output-file", str(output), "-", given="\n".join(lock.asked))
        pins = read_pins(output)
    lines = [f"{name}=={version}\n" for name, version in pins.items() if name not in lock.left_out]
    return lock.header + _BY + "".join(lines)


def write(name: str, lock: Lock) -> None:
    """Resolve a lock and write its file."""
    (FOLDER / name).write_text(resolve(lock, read_pins(FOLDER / "lock.txt")), encoding="utf-8")


def differences(name: str, lock: Lock) -> list[str]:
    """Compare a file with a resolution that prefers the file's versions. Returns: a line per difference."""
    path = FOLDER / name
    wanted, found = set(resolve(lock, read_pins(path)).splitlines()), set(path.read_text(encoding="utf-8").splitlines())
    return [f"requirements/{name} lacks {line}" for line in sorted(wanted - found)] + [
        f"requirements/{name} has {line}, which nothing requires" for line in sorted(found - wanted)
    ]


def main(arguments: list[str]) -> int:
    """Write the files, or checks them. Returns: 1 if `check` found a difference, 2 for wrong usage."""
    if arguments not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name, lock in locks().items():
        if arguments == ["write"]:
            write(name, lock)
            continue
        for line in differences(name, lock):
            print(line, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
