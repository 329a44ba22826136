"""Finds the manifests of this Tandem, and copies what an overlay is made of beside it.

A copy, not a reference: the folder can be kept in Git and applied from there (Argo CD, Flux) without a checkout of
Tandem. A newer Tandem changes a run's objects only when its overlay is written again.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from servicekit.errors import ConfigError

KUSTOMIZATION = "kustomization.yaml"
# The folder of a component's first half, which only the component itself includes.
_PART = "copy"


def find_manifests(given: Path | None = None) -> Path:
    """Find the folder `deploy/`: as given, in the checkout, or where the wheel puts it. Raises: ConfigError."""
    places = (
        [given]
        if given is not None
        else [
            Path(__file__).resolve().parents[3] / "deploy",
            Path(sysconfig.get_path("data")) / "share" / "tandem" / "deploy",
        ]
    )
    for place in places:
        if (place / "base" / KUSTOMIZATION).is_file():
            return place
    looked = " nor ".join(map(str, places))
    raise ConfigError(f"Tandem's manifests are not in {looked}; give deploy/ of a checkout with --manifests")


def names_of(manifests: Path, kind: str) -> list[str]:
    """List the overlays or components that there are, with those within others: `gpu-nodes/priority`."""
    found = [path.parent.relative_to(manifests / kind) for path in (manifests / kind).rglob(KUSTOMIZATION)]
    return sorted(str(path) for path in found if path.name != _PART)


def copy_manifests(manifests: Path, wanted: Iterable[str], target: Path) -> None:
    """Copy kustomizations with all that they refer to, without their documentation.

    Args:
        wanted: folders below `manifests`, e.g. `overlays/cluster`.
    Raises: ConfigError: one refers to a folder that is missing, or is outside of `manifests`.
    """
    copied: set[Path] = set()
    waiting = [_path(manifests, name) for name in wanted]
    while waiting:
        folder = waiting.pop()
        if folder in copied:
            continue
        copied.add(folder)
        if not folder.is_relative_to(manifests) or not (folder / KUSTOMIZATION).is_file():
            raise ConfigError(f"{folder} is not a kustomization below {manifests}")
        content = yaml.safe_load((folder / KUSTOMIZATION).read_text(encoding="utf-8"))
        named = {_path(folder, text) for text in _texts(content)} | {folder / KUSTOMIZATION}
        for path in sorted(named):
            if path.is_file() and path.is_relative_to(manifests):
                place = target / path.relative_to(manifests)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
        entries = [*content.get("resources", []), *content.get("components", [])]
        waiting += [path for path in (_path(folder, entry) for entry in entries) if not path.is_file()]


def _path(folder: Path, text: str) -> Path:
    """Return the path that a text of a kustomization may be: `file`, or `name=file` in a generator."""
    return Path(os.path.normpath(folder / text.rpartition("=")[2]))


def _texts(value: object) -> Iterator[str]:
    """Yield every one-line text in a tree."""
    if isinstance(value, str) and "\n" not in value:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
