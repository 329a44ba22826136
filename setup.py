"""Puts `deploy/` into the wheel, for `tandem deploy new` without a checkout; everything else is in pyproject.toml."""

from collections import defaultdict
from pathlib import Path

from setuptools import setup

# Not below the packages: a folder of manifests is none, and `deploy` would be a name that others may have.
PLACE = Path("share/tandem")
KINDS = {".yaml", ".json", ".conf", ".env", ".acl"}


def manifests() -> list[tuple[str, list[str]]]:
    """List the files of deploy/ that kustomizations use, by the folder that they go to."""
    found = defaultdict(list)
    for file in sorted(Path("deploy").rglob("*")):
        if file.is_file() and file.suffix in KINDS:
            found[str(PLACE / file.parent)].append(str(file))
    return list(found.items())


setup(data_files=manifests())
