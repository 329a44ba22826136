"""Finds the source of a user's own function without importing it: its text is kept for the whole run."""

import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path


def source_file(place: str) -> Path | None:
    """Find the file of own code where a worker process imports it from.

    Args:
        place: a .py file, or the name of a module.
    Returns: the file, which may be missing if it was given by name; None: no module with a source was found.
    """
    if place.endswith(".py"):
        return Path(place)
    top, *rest = place.split(".")
    # The path of a worker begins with its working directory. The other way is that of editable installations.
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    stems = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
    return next((file for file in files if file.is_file()), None)


def read_source(place: str) -> Mapping[str, str] | None:
    """Read own code. Returns: its `file` and `text`; None: it cannot be read, which the import will explain."""
    file = source_file(place)
    try:
        return None if file is None else {"file": str(file), "text": importlib.util.decode_source(file.read_bytes())}
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
