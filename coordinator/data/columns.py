"""Which columns the rows of a file have, and which rows lack one that others have."""

from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem_files.rows.problems import RowProblem

# Rows that are kept of those that lack a column.
_NAMED = 6
# Columns that are counted: memory does not grow with rows that have names of their own.
_MOST_COLUMNS = 1000


@dataclass(kw_only=True, slots=True)
class Lacking:
    """Rows that lack a column: how many, and the numbers of the first ones."""

    num_rows: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, number: int) -> None:
        """Count a row."""
        self.num_rows += 1
        if len(self.first) < _NAMED:
            self.first.append(number)


@dataclass(kw_only=True, slots=True)
class FileColumns:
    """The columns of a file's rows.

    Attributes:
        rows: all rows.
        lacking: by column, the rows without it.
    """

    rows: Lacking = field(default_factory=Lacking)
    lacking: dict[str, Lacking] = field(default_factory=dict)

    @classmethod
    def load(cls, saved: dict[str, Any]) -> "FileColumns":
        """Make it from `asdict` of one. Raises: TypeError, KeyError: it is something else."""
        lacking = {name: Lacking(**found) for name, found in saved["lacking"].items()}
        return cls(rows=Lacking(**saved["rows"]), lacking=lacking)

    def add(self, number: int, names: KeysView[str]) -> None:
        """Count a row by its columns."""
        if self.lacking.keys() != names:
            self._note(number, names)
        self.rows.add(number)

    def without(self, name: str) -> Lacking:
        """Return the rows without a column; none if it is one too many to be counted."""
        unknown = Lacking() if len(self.lacking) == _MOST_COLUMNS else self.rows
        return self.lacking.get(name, unknown)

    def _note(self, number: int, names: KeysView[str]) -> None:
        for name in names:
            if name not in self.lacking and len(self.lacking) < _MOST_COLUMNS:
                self.lacking[name] = Lacking(num_rows=self.rows.num_rows, first=list(self.rows.first))
        for name, lacking in self.lacking.items():
            if name not in names:
                lacking.add(number)


def lacking_rows(file: Path, columns: FileColumns, needed: Sequence[tuple[str, str]]) -> Iterator[RowProblem]:
    """Yield a problem for each needed column that rows of a file lack.

    Args:
        needed: columns, and who takes each.
    """
    for name, taker in needed:
        lacking = columns.without(name)
        if not lacking.num_rows:
            continue
        is_all = lacking.num_rows == columns.rows.num_rows
        yield RowProblem(
            file=file,
            number=None if is_all else lacking.first[0],
            message=f"{'none of its rows has' if is_all else 'has no'} {name!r}, which {taker} takes: fill it in, "
            f"{'leave the file out' if is_all else 'remove the row'}, or give the reward's parameter a default",
            num_others=0 if is_all else lacking.num_rows - 1,
            others=() if is_all else tuple(lacking.first[1:]),
        )
