"""What rewards take of the data's rows: rows that lack it are refused, stored samples say which columns it is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.data.columns import lacking_rows
from coordinator.data.scan import Scan
from coordinator.rewards.base import TakenColumns
from tandem_config.schema import RunConfig
from tandem_files.rows.problems import RowProblem


def columns_of(scans: Iterable[Scan]) -> list[str]:
    """List the columns of the first rows of each source."""
    return list(dict.fromkeys(name for scan in scans for name in scan.columns))


def rows_without(scans: Iterable[Scan], takers: Sequence[tuple[str, TakenColumns]]) -> list[RowProblem]:
    """Return the problems of rows that lack a column without which a reward cannot score.

    Args:
        takers: the rewards' names, and what each takes.
    """
    needed = [(column, f"the reward {name}") for name, takes in takers for column in takes.required]
    # Sets may share a file.
    by_file = {file: columns for scan in scans for file, columns in scan.by_file.items()}
    return [problem for file, columns in by_file.items() for problem in lacking_rows(file, columns, needed)]


@dataclass(frozen=True, kw_only=True)
class ShownColumns:
    """Which columns of a row are of interest besides its prompt and answer: those that rewards take.

    Attributes:
        named: by name.
        everything: whether a reward gets all of them.
        shown: those that hold prompt, answer and tools, which are shown in any case.
    """

    named: tuple[str, ...] = ()
    everything: bool = False
    shown: frozenset[str] = frozenset()

    @classmethod
    def of(cls, takes: Sequence[TakenColumns], config: RunConfig) -> "ShownColumns":
        """Join what the rewards of a run take."""
        sources = [*config.data.train, *(source for chosen in config.evaluation_sets() for source in chosen.data)]
        keys = [config.data.prompt_key, config.data.answer_key, config.data.tools_key, config.data.system_key]
        keys += [key for source in sources for key in (source.prompt_key, source.answer_key, source.system_key)]
        return cls(
            named=tuple(dict.fromkeys(name for taken in takes for name in (*taken.required, *taken.optional))),
            everything=any(taken.everything for taken in takes),
            shown=frozenset(key for key in keys if key is not None),
        )

    def within(self, row: Mapping[str, Any]) -> list[str]:
        """Return the names of those that a row has, in the row's order."""
        return [name for name in row if name not in self.shown and (self.everything or name in self.named)]
