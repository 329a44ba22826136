"""Versions of the software that a process runs, without importing any of it."""

import platform
from collections.abc import Iterable
from importlib import metadata

# Goes up with every change by which services of two releases misunderstand each other: protos, records in Redis, Lua.
PROTOCOL = 2


def software_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed version by name as given ("megatron_core" and "megatron-core" are the same package), and python's.

    Packages that are not installed are left out: the coordinator has no torch.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def release() -> str:
    """What all services of a run must have in common, in words."""
    version = software_versions(["tandem"]).get("tandem", "(not installed)")
    return f"tandem {version}, protocol {PROTOCOL}"
