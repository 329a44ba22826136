"""The results of `tandem evaluate` as a table."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = ("set", "prompts", "measure", "value", "95 % interval", "tokens", "cut off")


def print_evaluation(console: Console, results: Mapping[str, Any]) -> None:
    """Print the content of evaluation.json."""
    table = Table(*_COLUMNS, box=None, header_style="bold", pad_edge=False)
    for row in evaluation_lines(results):
        table.add_row(*row)
    console.print(table)


def evaluation_lines(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of each line: one per measure, with what is the set's own on its first."""
    lines: list[tuple[str, ...]] = []
    for result in results["sets"]:
        name = str(result["settings"]["name"])
        columns = results["columns"]
        own = (f"{columns[f'eval/{name}/length_mean']:.1f}", f"{columns[f'eval/{name}/truncated_ratio']:.1%}")
        heads = [(name, str(result["num_prompts"]))]
        for measure, found in result["measures"].items():
            interval = f"{_number(found['low'])} to {_number(found['high'])}"
            lines.append((*(heads.pop() if heads else ("", "")), measure, _number(found["value"]), interval, *own))
            own = ("", "")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
