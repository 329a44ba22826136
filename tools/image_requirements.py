"""Writes requirements/images/*.txt: the packages of each container image, a subset of the lock.

    python -m tools.image_requirements write     after a change of the lock, of pyproject.toml or of an import
    python -m tools.image_requirements check     lists files that are out of date; part of the tests

An image has what its packages import, and the dependencies of that. Versions are the lock's; torch is installed before
these files, from its own pin. Needs the development environment: it reads the metadata of the installed packages.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.check_venv import read_pins

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "requirements" / "images"
HEADER = "# Written by `python -m tools.image_requirements write`; a subset of ../lock.txt, installed with --no-deps.\n"
SHARED = ("servicekit", "tandem_api", "tandem_config", "tandem_files", "weightsync")


@dataclass(frozen=True, kw_only=True)
class Image:
    """The contents of a container image.

    Attributes:
        packages: packages of this repository.
        also: distributions to install even if no package imports them.
        without: distributions not to install although a package imports them, and why.
        base_has: distributions of its base image, which has their dependencies too.
    """

    packages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    base_has: tuple[str, ...] = ()


_ENGINE_SIDE = "only those modules of weightsync import it that run inside an engine"
_TORCH_FIRST = {"torch": "installed before, from requirements/torch.txt"}
_READS_NO_DATA = {
    "pyarrow": "for data and samples, which the coordinator reads and writes",
    "jinja2": "for chat templates, which the coordinator renders; torch brings it too",
}
_READS_NO_TEXT = _READS_NO_DATA | {"tokenizers": "for prompts and completions, which the coordinator reads and writes"}

# Debian 12's Python; a later 3.11 needs nothing more.
_OLDEST = {"extra": "", "python_full_version": "3.11.2"}

IMAGES = {
    "coordinator": Image(
        packages=("coordinator", "launcher", "reward_service", "environment_service", "tandem_clients", *SHARED),
        without={
            "torch": _ENGINE_SIDE,
            "safetensors": _ENGINE_SIDE,
            "huggingface-hub": "tokenizers imports it to download, and an image has its model mounted",
            "aiohttp": "for the asyncio half of the Kubernetes client, which we do not use",
            "tzdata": "python-dateutil reads the time zones of the base image",
            "matplotlib": "draws the curve at the end of `tandem run`, which images do not use",
        },
    ),
    "trackers": Image(
        also=("mlflow-skinny", "tensorboard", "wandb"),
        without={"setuptools": "tensorboard reads nothing of it", "pillow": "for images, which we send none of"},
    ),
    "trainer": Image(packages=("trainer_service", *SHARED), without=_TORCH_FIRST | _READS_NO_TEXT),
    # The SDK accepts no other version of the API than its own.
    "trainer-gpu": Image(
        packages=("trainer_service", *SHARED),
        also=("opentelemetry-api",),
        without=_READS_NO_TEXT,
        base_has=("torch", "sglang"),
    ),
    # SGLang imports dill without saying that it needs it.
    "rollout": Image(packages=("rollout_service", *SHARED), also=("dill",), without=_TORCH_FIRST | _READS_NO_DATA),
    "rollout-gpu": Image(
        packages=("rollout_service", *SHARED),
        also=("opentelemetry-api",),
        without=_READS_NO_DATA,
        base_has=("torch", "sglang"),
    ),
}


def contents(image: Image) -> list[str]:
    """List the distributions to install, by their names in the lock, in alphabetical order."""
    roots: list[str] = [canonicalize_name(name) for name in image.also]
    roots += [name for package in image.packages for name in _imported(package)]
    wanted = _closure(roots, leave_out=image.without) - _closure(image.base_has) | set(image.also)
    return [name for name in read_pins(REPO / "requirements" / "lock.txt") if canonicalize_name(name) in wanted]


def text(image: Image) -> str:
    """Generate the requirements file of an image."""
    pins = read_pins(REPO / "requirements" / "lock.txt")
    return HEADER + "".join(f"{name}=={pins[name]}\n" for name in contents(image))


@cache
def _imported(package: str) -> frozenset[str]:
    """Find the distributions, of those that pyproject.toml declares, whose modules a package imports anywhere."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["trainer"]]
    lines += project["optional-dependencies"]["rollout"]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    providers = _providers()
    found: set[str] = set()
    for path in sorted((REPO / package).rglob("*.py")):
        for module in _modules(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {canonicalize_name(name) for name in providers.get(module, [])}
    return frozenset(found & declared)


@cache
def _providers() -> Mapping[str, list[str]]:
    """Map every top-level module to the distributions that have it."""
    return metadata.packages_distributions()


def _modules(tree: ast.Module) -> set[str]:
    """Collect the top-level names of all imported modules, also of imports in functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def _closure(roots: Iterable[str], leave_out: Iterable[str] = ()) -> set[str]:
    """Return the distributions and their dependencies, as far as they are installed and not in `leave_out`."""
    seen, waiting = {canonicalize_name(name) for name in leave_out}, list(roots)
    found: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for a GPU or another platform; not in the lock
        found.add(name)
        requirements = [Requirement(line) for line in needs]
        waiting += [item.name for item in requirements if item.marker is None or item.marker.evaluate(_OLDEST)]
    return found


def main(arguments: list[str]) -> int:
    """Write the files, or checks them. Returns: 1 if `check` found a difference, 2 for wrong usage."""
    if arguments not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name, image in IMAGES.items():
        path, wanted = FOLDER / f"{name}.txt", text(image)
        if arguments == ["write"]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            stale.append(path.relative_to(REPO).as_posix())
    for name in stale:
        print(f"{name} is out of date: run `python -m tools.image_requirements write`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
