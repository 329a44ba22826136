"""Commands on checkpoints, without services: `tandem checkpoints`, `tandem export` and `tandem import`.

The first lists what each checkpoint of a run holds, and whether its files are as they were written. An export makes a
Hugging Face folder from a checkpoint; an import makes a trainer checkpoint at a layout from such a folder.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from launcher.report import make_console, reporting, table_of
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
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
from trainer_service.checkpoints.files import CHECKPOINT, parallel_of, read_meta
from trainer_service.export import ExportSource, Form, compare_export, export
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

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
# Advice where torch is missing, as in the coordinator's image.
_ELSEWHERE = "run this where Tandem is installed whole, or in the trainer's image: python -m trainer_service.export"


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
    texts = ("layout", "holds", "state")
    table = table_of("iteration", "version", "size", *texts, texts=texts, wraps=True)
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
    """Describe a checkpoint; None: a run that continues meanwhile has removed it."""
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


@reporting("not exported: ")
def export_command(source: ExportSource, out: Path | None, test: Path | None, *, form: Form, tolerance: float) -> int:
    """Run `tandem export`; see trainer_service.export. Returns: the exit code."""
    console, complaints = make_console(), make_console(stderr=True)

    def warn(text: str) -> None:
        complaints.print(Text(text, style="bold yellow"))

    if (out is None) == (test is None):
        raise ConfigError("give --out DIR to write, or --test DIR to compare")
    try:
        if test is not None:
            alike, text = compare_export(source, test, warn, tolerance=tolerance)
            console.print(Text(text, style="bold green" if alike else "bold red"))
            return EXIT_OK if alike else EXIT_FAILED
        if out is not None:
            console.print(Text(export(source, out, warn, form=form), style="bold green"))
    except ModuleNotFoundError as error:  # in the coordinator's image
        raise ConfigError(f"{error}: {_ELSEWHERE}") from error
    except OSError as error:
        what = f"write {out}" if out is not None else f"compare with {test}"
        complaints.print(Text(f"failed: cannot {what}: {error}", style="bold red"))
        return EXIT_FAILED
    return EXIT_OK


@reporting("not imported: ")
def import_command(config: Path, overrides: Sequence[str], out: Path) -> int:
    """Run `tandem import`. Returns: the exit code."""
    console, complaints = make_console(), make_console(stderr=True)
    begun_s = time.perf_counter()
    try:
        settings = load_config(config, overrides)
        spec, parallel = ModelSpec.from_folder(settings.model.path), Parallel(**settings.trainer.parallel_sizes)
        if out.exists() and not CHECKPOINT.is_in(out):
            raise ConfigError(f"--out {out} holds something else than {CHECKPOINT.name}: choose a new folder")
        import torch

        from trainer_service.checkpoints.importing import import_policy

        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        written = import_policy(settings.model.path, spec, parallel, dtype, out.absolute())
    except OSError as error:
        complaints.print(Text(f"failed: cannot write {out}: {error}", style="bold red"))
        return EXIT_FAILED
    seconds = time.perf_counter() - begun_s
    ranks = "1 rank" if parallel.world_size == 1 else f"{parallel.world_size} ranks"
    text = f"{settings.model.path} is in {out}: {written / _MIB:.1f} MiB for {ranks}, {seconds:.1f} s"
    console.print(Text(text, style="bold green"))
    return EXIT_OK
