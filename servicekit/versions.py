"""Reads the versions of installed software without importing it."""

import platform
from collections.abc import Iterable
from importlib import metadata

# Increased with every incompatible change between services: protos, records in Redis, Lua.
PROTOCOL = 2


def software_versions(names: Iterable[str]) -> dict[str, str]:
    """Read the installed versions, by the names as given ("megatron_core" is "megatron-core"), and python's.

    Packages that are not installed are left out, e.g. torch on the coordinator.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def release() -> str:
    """Describe the release, which must be the same in all services of a run."""
    version = software_versions(["tandem"]).get("tandem", "(not installed)")
    return f"tandem {version}, protocol {PROTOCOL}"
