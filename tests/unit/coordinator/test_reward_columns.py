"""The columns of rows: which rows lack one, and which of them rewards take."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from coordinator.data.columns import FileColumns, Lacking, lacking_rows
from coordinator.rewards.base import TakenColumns
from coordinator.rewards.taken import ShownColumns
from tandem_config.loading import draft_config
from tests.kit.folders import write_config


def counted(rows: Sequence[Sequence[str]]) -> FileColumns:
    columns = FileColumns()
    for number, names in enumerate(rows, 1):
        columns.add(number, dict.fromkeys(names).keys())
    return columns


def test_rows_before_and_after_the_first_with_a_column_lack_it() -> None:
    columns = counted([["a"], ["a"], ["a", "b"], ["a"], ["b", "c"]])
    assert columns.without("a") == Lacking(num_rows=1, first=[5])
    assert columns.without("b") == Lacking(num_rows=3, first=[1, 2, 4])
    assert columns.without("c") == Lacking(num_rows=4, first=[1, 2, 3, 4])
    assert columns.without("d") == Lacking(num_rows=5, first=[1, 2, 3, 4, 5])
    assert FileColumns.load(asdict(columns)) == columns


def test_names_of_their_own_in_each_row_do_not_fill_the_memory() -> None:
    columns = counted([["a", f"own{number}"] for number in range(1200)])
    assert len(columns.lacking) == 1000
    assert (columns.without("a").num_rows, columns.without("own0").num_rows) == (0, 1199)
    assert columns.without("own1199") == Lacking()  # not counted


def test_of_many_rows_the_first_are_named_and_all_counted() -> None:
    (problem,) = lacking_rows(Path("a.jsonl"), counted([["a"]] * 2000 + [["a", "b"]]), [("b", "it"), ("a", "it")])
    assert (problem.place, problem.num_others, problem.others) == ("a.jsonl:1", 1999, (2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("takes", "shown"),
    [
        ([], []),
        ([TakenColumns(required=("level", "answer"))], ["level"]),
        ([TakenColumns(optional=("hint", "gone")), TakenColumns(required=("level",))], ["level", "hint"]),
        ([TakenColumns(everything=True)], ["level", "hint"]),
    ],
)
def test_what_rewards_take_beside_prompt_and_answer_is_shown(
    takes: list[TakenColumns], shown: list[str], tmp_path: Path
) -> None:
    config = draft_config(write_config(tmp_path)).config
    assert config is not None
    row = {"prompt": "p", "level": 3, "answer": "a", "hint": None}
    assert ShownColumns.of(takes, config).within(row) == shown
