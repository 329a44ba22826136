"""Reads the versions of installed software without importing it."""

import platform
from collections.abc import Iterable
from functools import cache
from importlib import metadata

# Increased with every incompatible change between services: protos, records in Redis, Lua.
PROTOCOL = 2


def software_versions(names: Iterable[str]) -> dict[str, str]:
    """Read the installed versions, by the names as given ("megatron_core" is "megatron-core"), and python's.

    Packages that are not installed are left out, e.g. torch on the coordinator.
    """
    versions = {name: version for name in names if (version := _installed(name)) is not None}
    return {"python": platform.python_version(), **versions}


@cache  # reading one takes up to a millisecond, and every status has them
def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release() -> str:
    """Describe the release, which must be the same in all services of a run."""
    version = software_versions(["tandem"]).get("tandem", "(not installed)")
    return f"tandem {version}, protocol {PROTOCOL}"
