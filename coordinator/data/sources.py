"""The sources of a part of the data: their files, names, weights and columns."""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem_clients.flow import DataKey
from tandem_config.schema import DataSection
from tandem_config.sections.data import DataSource
from tandem_files.rows.files import find_files
from tandem_files.rows.problems import DataError
from tandem_files.rows.reading import RowKeys

# Longest file label in a group id; ids are sent with every request.
_LABEL_LENGTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of a source."""

    path: Path
    # As the configuration names its source.
    name: str
    # In group ids; "" if it is the only file of the part.
    label: str
    keys: RowKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """Files whose rows are shuffled together."""

    files: tuple[SourceFile, ...]
    # Rate at which its rows are drawn, relative to the other sources.
    weight: float = 1.0


def find_sources(section: DataSection, part: DataKey) -> list[RowSource]:
    """Find the files of all sources of a part; without weights there is one, with all files.

    Raises: DataError: a file that is not there or cannot be data, or is named twice.
    """
    given = section.train if part == "train" else section.heldout
    if given is None:
        raise ValueError(f"data.{part} is not set")
    paths = [find_files(source.path) for source in given]
    _refuse_twice([path for found in paths for path in found])
    labels = _labels([path for found in paths for path in found])
    files = [
        tuple(
            SourceFile(path=path, name=_name(source, found), label=labels[path], keys=_keys(section, source))
            for path in found
        )
        for source, found in zip(given, paths, strict=True)
    ]
    if given[0].weight is None:
        return [RowSource(files=tuple(file for of_source in files for file in of_source))]
    return [
        RowSource(files=of_source, weight=source.weight)
        for source, of_source in zip(given, files, strict=True)
        if source.weight is not None
    ]


def _keys(section: DataSection, source: DataSource) -> RowKeys:
    return RowKeys(
        prompt=section.prompt_key if source.prompt_key is None else source.prompt_key,
        answer=section.answer_key if source.answer_key is None else source.answer_key,
        tools=section.tools_key,
        system=(section.system_key if source.system_key is None else source.system_key) or None,
    )


def _name(source: DataSource, found: list[Path]) -> str:
    if source.name is not None:
        return source.name
    return _short(found[0].stem if len(found) == 1 else found[0].parent.name)


def _labels(files: list[Path]) -> dict[Path, str]:
    """Return a short name for each file, different for each; "" for a single one."""
    if len(files) == 1:
        return {files[0]: ""}
    labels: dict[Path, str] = {}
    taken: set[str] = set()
    for file in files:
        stem = label = _short(file.stem)
        number = 1
        while label in taken:
            number += 1
            label = f"{stem}-{number}"
        taken.add(label)
        labels[file] = label
    return labels


def _short(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[-_LABEL_LENGTH:].strip("-") or "data"


def _refuse_twice(files: list[Path]) -> None:
    seen: dict[Path, Path] = {}
    for file in files:
        same = seen.setdefault(file.resolve(), file)
        if same is not file:
            also = "" if same == file else f", also as {same}"
            raise DataError.of(file, f"is named twice{also}: its rows would be drawn twice as often; give a weight")
