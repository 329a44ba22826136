"""Writes requirements/images/*.txt: what each container image installs, a subset of the lock.

    python -m tools.image_requirements write     after a change of the lock, of pyproject.toml or of an import
    python -m tools.image_requirements check     says what is out of date; part of the tests

An image holds what its packages import, and what that needs in turn. Versions are the lock's; torch is installed before
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
    """What one image is made for.

    Attributes:
        packages: ours, that it holds.
        also: distributions that are installed in any case.
        without: distributions that it does without, though a package imports them somewhere, and why.
        base_has: distributions that come with its base image, as does all that they need.
    """

    packages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    base_has: tuple[str, ...] = ()


_ENGINE_SIDE = "only those modules of weightsync import it that run inside an engine"
_TORCH_FIRST = {"torch": "installed before, from requirements/torch.txt"}
_READS_NO_DATA = {"pyarrow": "for Parquet data, which the coordinator reads"}
_READS_NO_TEXT = _READS_NO_DATA | {"tokenizers": "for prompts and completions, which the coordinator reads and writes"}

# Debian 12's Python; a later 3.11 needs nothing more.
_OLDEST = {"extra": "", "python_full_version": "3.11.2"}

IMAGES = {
    "coordinator": Image(
        packages=("coordinator", "launcher", *SHARED),
        without={
            "torch": _ENGINE_SIDE,
            "safetensors": _ENGINE_SIDE,
            "huggingface-hub": "tokenizers imports it to download, and an image has its model mounted",
            "aiohttp": "for the asyncio half of the Kubernetes client, which we do not use",
            "tzdata": "python-dateutil reads the time zones of the base image",
            "pyarrow": "160 MB that only Parquet data needs; parquet.txt adds it",
            "matplotlib": "draws the curve at the end of `tandem run`, which images do not use",
        },
    ),
    "parquet": Image(also=("pyarrow",)),
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
    """Returns the names of the distributions to install, as the lock writes them, in alphabetical order."""
    roots: list[str] = [canonicalize_name(name) for name in image.also]
    roots += [name for package in image.packages for name in _imported(package)]
    wanted = _closure(roots, leave_out=image.without) - _closure(image.base_has) | set(image.also)
    return [name for name in read_pins(REPO / "requirements" / "lock.txt") if canonicalize_name(name) in wanted]


def text(image: Image) -> str:
    """Returns the requirements file of an image."""
    pins = read_pins(REPO / "requirements" / "lock.txt")
    return HEADER + "".join(f"{name}=={pins[name]}\n" for name in contents(image))


@cache
def _imported(package: str) -> frozenset[str]:
    """Distributions, among those that pyproject.toml declares, whose modules a package of ours imports anywhere."""
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
    """Distributions by the top-level module that they have."""
    return metadata.packages_distributions()


def _modules(tree: ast.Module) -> set[str]:
    """Top-level names of all modules that are imported, at the top or in a function."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def _closure(roots: Iterable[str], leave_out: Iterable[str] = ()) -> set[str]:
    """The distributions and all that they need, as far as they are installed and not left out."""
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
            continue  # for a GPU, or another platform; the lock does without
        found.add(name)
        requirements = [Requirement(line) for line in needs]
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate(_OLDEST)]
    return found


def main(arguments: list[str]) -> int:
    """Writes the files, or checks them. Returns: 1 if `check` found a difference, 2 for a wrong call."""
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
    for each in stale:
        print(f"{each} is not what the code imports: run `python -m tools.image_requirements write`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
