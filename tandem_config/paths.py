"""Paths in the values of keys: made absolute when they are read, and written again as a user would write them.

A path is the whole value (`model.path`) or lies within it (`data.train`: a list of sources; `data.chat_template`: a
path or a text).
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem_config import keys
from tandem_config.sections.reward import CodeReference, split_reference


def absolute(path: Path) -> Path:
    """Make a path absolute and without `..`; symbolic links are kept, because their target may move."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def anchored(key: str, value: Any, base: Path) -> Any:
    """Return the raw value of a dotted key with its paths below `base`; what is no path stays as it is."""
    if key in _WITHIN:
        return _WITHIN[key](value, base)
    if keys.takes(key, CodeReference):
        return _reference(value, base)
    return _path(value, base) if keys.takes(key, Path) else value


def written(key: str, value: Any) -> Any:
    """Return a validated value as plain data, with absolute paths, that loads to an equal value."""
    if key in ("data.train", "data.heldout") and value is not None:
        return _written_sources(value)
    if key == "evaluation.sets":
        return [entry | {"data": _written_sources(entry["data"])} for entry in value]
    return str(absolute(value)) if isinstance(value, Path) else value


def is_jinja_file(text: str) -> bool:
    """Whether a value of `data.chat_template` is a path."""
    return text.endswith(".jinja") and "{" not in text and "\n" not in text


def below(base: Path, text: str) -> Path:
    """Make a written path absolute; `~` and variables of the environment are expanded, unknown ones stay."""
    return absolute(base / Path(os.path.expandvars(text)).expanduser())


def _path(value: Any, base: Path) -> Any:
    return below(base, value) if isinstance(value, str) and value.strip() else value


def _text(value: Any, base: Path) -> Any:
    path = _path(value, base)
    return str(path) if isinstance(path, Path) else path


def _template(value: Any, base: Path) -> Any:
    return _text(value, base) if isinstance(value, str) and is_jinja_file(value) else value


def _reference(value: Any, base: Path) -> Any:
    """Make the file of `FILE.py:FUNCTION` absolute; a module's name stays."""
    if not isinstance(value, str):
        return value
    place, function = split_reference(value)
    return f"{_text(place, base)}:{function}" if place.endswith(".py") else value


def _references(value: Any, base: Path) -> Any:
    return [_reference(entry, base) for entry in value] if isinstance(value, list) else value


def _sources(value: Any, base: Path) -> Any:
    if isinstance(value, list):
        return [_sources(entry, base) for entry in value]
    if isinstance(value, Mapping):
        return {name: _text(entry, base) if name == "path" else entry for name, entry in value.items()}
    return _text(value, base)


def _sets(value: Any, base: Path) -> Any:
    if not isinstance(value, list):
        return value
    return [
        {**entry, "data": _sources(entry["data"], base)} if isinstance(entry, Mapping) and "data" in entry else entry
        for entry in value
    ]


def _written_sources(sources: tuple[dict[str, Any], ...]) -> Any:
    """Write sources in their shortest form: a path, a list of paths, a list of mappings."""
    entries = [
        {name: str(absolute(entry)) if name == "path" else entry for name, entry in source.items() if entry is not None}
        for source in sources
    ]
    short = [entry["path"] if len(entry) == 1 else entry for entry in entries]
    return short[0] if len(short) == 1 else short


_WITHIN: dict[str, Callable[[Any, Path], Any]] = {
    "data.train": _sources,
    "data.heldout": _sources,
    "evaluation.sets": _sets,
    "data.chat_template": _template,
    "environment.tools": _references,
}
