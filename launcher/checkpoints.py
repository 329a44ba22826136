"""`tandem checkpoints`: a run's checkpoints, what each holds, and whether its files are as they were written."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.view.run_view import make_console
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_files.checkpoints import (
    COMPLETE,
    FOLDER,
    TRAINER_FOLDER,
    inspect,
    is_kept,
    list_all,
    read_best,
    read_complete,
    step_folder,
)
from tandem_files.model.safetensors_header import read_header
from trainer_service.checkpoints.files import parallel_of, read_meta
from weightsync.layouts.layout import Parallel

# What users call the kinds of tensors in a shard (trainer_service/checkpoints/files.py), in the order of the output.
_CONTENTS = {
    "weights": "weights",
    "main": "float32 masters",
    "exp_avg": "AdamW",
    "exp_avg_sq": "AdamW",
    "step": "AdamW",
    "rng": "random states",
}
_SHORT = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "data": "DP",
    "context": "CP",
    "expert": "EP",
    "expert_tensor": "ETP",
}
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A checkpoint as the table shows it; `damage`: why it cannot be used."""

    iteration: int
    version: str = "-"
    size: str
    layout: str = "-"
    holds: str = "-"
    state: str
    damage: str = ""


def checkpoints_command(run_dir: Path, *, deep: bool) -> int:
    """Run `tandem checkpoints`. deep: compare all files with their digests. Returns: the exit code."""
    console, complaints = make_console(), make_console(stderr=True)
    found = list_all(run_dir)
    if not found:
        what = f"has no {FOLDER}/step-* yet" if run_dir.is_dir() else "no such folder"
        complaints.print(Text(f"{run_dir}: {what}: give the folder of a run", style="bold red"))
        return EXIT_BAD_CONFIG
    described = [_row(iteration, folder, deep=deep) for iteration, folder in found]
    rows = [row for row in described if row is not None]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("iteration", "version", "size", "layout", "holds", "state"):
        table.add_column(name, justify="right" if name in ("iteration", "version", "size") else "left")
    marks = dict(_marks(run_dir, rows))
    for row in rows:
        state = ", ".join([row.state, *marks.get(row.iteration, [])])
        table.add_row(str(row.iteration), row.version, row.size, row.layout, row.holds, state)
    console.print(table)
    damaged = [row for row in rows if row.damage]
    for row in damaged:
        text = f"iteration {row.iteration} is damaged: {row.damage}: restore the file from a copy, or use another one"
        complaints.print(Text(text, style="bold red"))
    return EXIT_FAILED if damaged else EXIT_OK


def _row(iteration: int, folder: Path, *, deep: bool) -> _Row | None:
    """Describe a checkpoint; None: a run that continues beside this has removed it meanwhile."""
    size = f"{_num_bytes(folder) / _MIB:.1f} MiB"
    row = _Row(iteration=iteration, size=size, state="unfinished")
    if (folder / COMPLETE).is_file():
        row = _complete_row(iteration, folder, size, deep=deep)
        # A run removes the mark first, then the files, which are damage only while the mark is there.
        if row.damage and not (folder / COMPLETE).is_file():
            row = _Row(iteration=iteration, size=size, state="unfinished")
    return row if folder.is_dir() else None


def _complete_row(iteration: int, folder: Path, size: str, *, deep: bool) -> _Row:
    damage = inspect(folder, deep=deep)
    state = "damaged" if damage else "undamaged" if deep else "complete"
    try:
        version = str(read_complete(folder).get("policy_version", "-"))
        meta = read_meta(folder / TRAINER_FOLDER)
        layout = _layout(parallel_of(folder, meta))
        holds = _holds(folder / TRAINER_FOLDER, meta)
    except (ConfigError, OSError, ValueError) as error:
        return _Row(iteration=iteration, size=size, state="damaged", damage=damage or str(error))
    return _Row(iteration=iteration, version=version, size=size, layout=layout, holds=holds, state=state, damage=damage)


def _num_bytes(folder: Path) -> int:
    """Add up the files of a folder, without those that a run renames or removes meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that are not there any more
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def _layout(parallel: Parallel) -> str:
    """Return parallel sizes as text.

    >>> _layout(Parallel(tensor=2, pipeline=4)), _layout(Parallel())
    ('TP2 PP4', '1 rank')
    """
    sizes = asdict(parallel)
    return " ".join(f"{short}{sizes[name]}" for name, short in _SHORT.items() if sizes[name] > 1) or "1 rank"


def _holds(folder: Path, meta: dict[str, Any]) -> str:
    """Return the kinds of state in a trainer's shards as text."""
    kinds = {name.partition("/")[0] for path in folder.glob("*.safetensors") for name in read_header(path)}
    known = dict.fromkeys(name for kind, name in _CONTENTS.items() if kind in kinds)
    return f"{meta['dtype']} {', '.join([*known, *sorted(kinds - _CONTENTS.keys())])}"


def _marks(run_dir: Path, rows: list[_Row]) -> Iterator[tuple[int, list[str]]]:
    """Yield what is special about a checkpoint: a resume continues from it; it is the best one."""
    usable = [row.iteration for row in rows if row.state != "unfinished" and not row.damage]
    best = read_best(run_dir)
    for row in rows:
        notes = ["a resume continues here"] if usable and row.iteration == usable[-1] else []
        if best is not None and best.iteration == row.iteration:
            notes.append(f"best by {best.metric} ({best.value:g})")
        if is_kept(step_folder(run_dir, row.iteration)):
            notes.append("kept: the best by an evaluation set that has changed")
        yield row.iteration, notes
