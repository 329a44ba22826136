"""Finds the folders of `tandem evaluate`, and shows their results as a table and for `tandem status`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tandem_files.metrics_file import score_text
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import is_locked, read_evaluation, read_notes

_COLUMNS = ("set", "prompts", "measure", "value", "95 % interval", "tokens", "cut off")


def is_evaluation(folder: Path) -> bool:
    """Whether the folder is that of an evaluation, not of a run that trains; also before there are results."""
    if read_evaluation(folder) is not None:
        return True
    # `tandem run` leaves notes; a run that trains may set serve_model, to no effect.
    if read_notes(folder) is not None:
        return False
    try:
        config = yaml.safe_load((folder / RESOLVED_CONFIG).read_text(encoding="utf-8"))
        return bool(config["rollout"]["serve_model"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return False


def describe_evaluation(folder: Path) -> list[tuple[str, str]]:
    """Describe an evaluation for `tandem status`, as (name, text) pairs: its state, and its results if it has any."""
    lines, results = [("evaluation", str(folder))], read_evaluation(folder)
    if results is None:
        ended = f"not running, without results; logs: {folder / 'logs'}"
        return [*lines, ("state", "running" if is_locked(folder) else ended)]
    lines += [("state", "finished"), ("model", str(results["model"]))]
    for name, prompts, measure, value, interval, tokens, cut_off in evaluation_lines(results):
        of_set = f", {prompts} prompts, {tokens} tokens, {cut_off} cut off" if prompts else ""
        lines.append((name, f"{measure} {value} (95 %: {interval}){of_set}"))
    return lines


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
    return "-" if value is None else score_text(value)
