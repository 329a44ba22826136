"""Problems of data files: named by file and row, equal ones counted instead of repeated."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

# Row numbers that a fault is reported with besides the first.
_OTHERS_NAMED = 5
# Kinds of faults that are described; the rest is counted.
_DESCRIBED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProblem:
    """A problem of a data file; `number` is its line or row, None for the file as a whole.

    Attributes:
        alone: the message instead, if other rows of the file can be used; "" if it is the same.
    """

    file: Path
    number: int | None
    message: str
    # Other lines or rows with the same fault, and the first of them.
    num_others: int = 0
    others: tuple[int, ...] = ()
    alone: str = ""

    def beside_sound_rows(self) -> "RowProblem":
        """Return the problem as that of a row whose file has others that can be used."""
        return replace(self, message=self.alone or self.message)

    @property
    def place(self) -> str:
        """The file, with the line or row."""
        return str(self.file) if self.number is None else f"{self.file}:{self.number}"

    @property
    def text(self) -> str:
        """The message, with the other rows that have the same fault."""
        if not self.num_others:
            return self.message
        named = ", ".join(map(str, self.others)) + (", ..." if self.num_others > len(self.others) else "")
        rows = "row" if self.num_others == 1 else "rows"
        return f"{self.message} (and {self.num_others} more {rows} with the same fault: {named})"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class DataError(ValueError):
    """Data cannot be used; the message lists their problems."""

    def __init__(self, problems: list[RowProblem], more_problems: int = 0) -> None:
        self.problems = problems
        tail = [f"... and {more_problems} more problems"] if more_problems else []
        super().__init__("\n".join([*map(str, problems), *tail]))

    @classmethod
    def of(cls, file: Path, message: str, number: int | None = None) -> "DataError":
        """Make the error of a single problem."""
        return cls([RowProblem(file=file, number=number, message=message)])


@dataclass(kw_only=True, slots=True)
class Faults:
    """Problems of rows, one per kind of fault and file; memory does not grow with the number of bad rows."""

    limit: int = _DESCRIBED
    # Problems beyond the limit: counted, not described.
    num_more: int = 0
    _by_kind: dict[tuple[Path, str], RowProblem] = field(default_factory=dict)

    def add(self, problem: RowProblem) -> None:
        """Count a problem with those of the same kind."""
        kind = (problem.file, _kind(problem.message))
        if kind in self._by_kind:
            self._by_kind[kind] = _with_another(self._by_kind[kind], problem)
        elif len(self._by_kind) < self.limit:
            self._by_kind[kind] = problem
        else:
            self.num_more += 1

    def note_sound_rows(self, file: Path) -> None:
        """Say of the file's problems that other rows of it can be used, once all of it is read."""
        for kind, problem in self._by_kind.items():
            if problem.file == file:
                self._by_kind[kind] = problem.beside_sound_rows()

    @property
    def problems(self) -> list[RowProblem]:
        """The first problem of each kind, with the number of its like."""
        return list(self._by_kind.values())

    def error(self) -> DataError:
        """Return the error that lists them."""
        return DataError(self.problems, self.num_more)


def _kind(message: str) -> str:
    """Return what messages of the same fault have in common: the text without values and places."""
    return re.sub(r"\(.*\)|\d+|0x\w+", "", message, flags=re.DOTALL)


def _with_another(first: RowProblem, other: RowProblem) -> RowProblem:
    named = (
        first.others if other.number is None or len(first.others) == _OTHERS_NAMED else (*first.others, other.number)
    )
    return replace(first, num_others=first.num_others + 1, others=named)
