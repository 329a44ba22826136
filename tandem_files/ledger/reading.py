"""Reads a run's ledger: the account of its samples, what is damaged, and what a resume needs of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.checkpoints import list_complete
from tandem_files.ledger.account import Account
from tandem_files.ledger.records import FORMAT, NoRecord, Record, read_records, segments


@dataclass(kw_only=True)
class LedgerContent:
    """What a run's ledger says.

    Attributes:
        heads: by number of a segment, what its first record says; {}: that one is damaged.
        resumes: the records of resumes, in order.
        steps: the last train step of each iteration since the oldest checkpoint that is kept.
        repeats: how often in a row a wave was continued with all of its groups.
        checkpoints: by iteration, the digest of the train steps before its checkpoint.
        waves: by iteration of a checkpoint, the first wave that had groups under way.
        damages: what is not readable, or missing, as sentences.
    """

    account: Account = field(default_factory=lambda: Account(problems=[]))
    heads: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    num_records: int = 0
    resumes: list[Mapping[str, Any]] = field(default_factory=list)
    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    repeats: Counter[int] = field(default_factory=Counter)
    checkpoints: dict[int, str] = field(default_factory=dict)
    waves: dict[int, int] = field(default_factory=dict)
    damages: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What is damaged, and what cannot be true of the records that are left."""
        return [*self.damages, *(self.account.problems or ())]


def read_ledger(run_dir: Path, run_id: str = "") -> LedgerContent:
    """Read a run's ledger; an empty one if it has none.

    Args:
        run_id: of the run; "": not compared.
    Raises: ConfigError: it is another run's, or a newer release wrote it; nothing was changed. OSError.
    """
    try:
        return _read(run_dir, run_id)
    except FileNotFoundError:  # a run that works has removed its oldest segment meanwhile
        return _read(run_dir, run_id)


def _read(run_dir: Path, run_id: str) -> LedgerContent:
    ledger, paths = LedgerContent(), segments(run_dir)
    firsts = {number: next(read_records(path), None) for number, path in paths.items()}
    for number, path in paths.items():
        head = firsts[number]
        ledger.heads[number] = head.fields if isinstance(head, Record) and head.kind == "segment" else {}
        _check_head(ledger.heads[number], path, run_id)
    first = min(paths, default=1)
    ledger.damages += ledger.heads.get(first, {}).get("problems", [])  # those of segments that are gone
    begins = ledger.heads[first]["account"].get("settled_until", 0) if paths and ledger.heads[first] else 0
    kept = min((iteration for iteration, _ in list_complete(run_dir)), default=0)
    if first > 1 and begins > kept:  # one that is not needed any more ends with a checkpoint that is older than all
        ledger.damages.append(
            f"{paths[first]} begins after iteration {begins}: the segments since iteration {kept} are missing"
        )
    for number, path in paths.items():
        if number > min(paths) and number - 1 not in paths:
            ledger.damages.append(f"{path.parent}/{number - 1:08}.log is missing: what it held is not known")
        size = path.stat().st_size
        sealed = ledger.heads.get(number + 1, {}).get("after", size)
        if size > sealed:
            ledger.damages.append(f"{path}: {size - sealed} bytes at {sealed} are of a coordinator that was replaced")
        if size < sealed:
            ledger.damages.append(f"{path}: {sealed - size} bytes at its end are missing")
        for found in read_records(path, sealed):
            _add(ledger, found)
    return ledger


def _add(ledger: LedgerContent, found: Record | NoRecord) -> None:
    if isinstance(found, NoRecord):
        ledger.damages.append(str(found))
        return
    ledger.num_records += 1
    try:
        ledger.account.add(found)
        if found.kind in ("begun", "continued"):
            wave = found.fields["iteration"]
            has_all = len(found.fields["groups"]) == len(ledger.account.open_groups(wave))
            ledger.repeats[wave] = ledger.repeats[wave] + 1 if found.kind == "continued" and has_all else 0
        elif found.kind == "resumed":
            ledger.resumes.append(found.fields)
        elif found.kind == "step":
            ledger.steps[found.fields["iteration"]] = found.fields
        elif found.kind == "checkpoint":
            iteration = found.fields["iteration"]
            ledger.checkpoints[iteration] = found.fields["digest"]
            ledger.waves[iteration] = found.fields.get("wave", iteration + 1)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        ledger.damages.append(f"record {found.kind} lacks what it should have: {error!r}")


def _check_head(head: Mapping[str, Any], path: Path, run_id: str) -> None:
    if head.get("format", 0) > FORMAT:
        raise ConfigError(
            f"{path} was written by a newer release of Tandem (format {head['format']}, this one reads {FORMAT}): "
            f"resume with that release, or move the folder {path.parent.name}/ away"
        )
    if run_id and head.get("run_id", run_id) != run_id:
        raise ConfigError(
            f"{path} is of the ledger of run {head['run_id']!r}, and this is run {run_id!r}: move the folder "
            f"{path.parent.name}/ away, or restore this run's own"
        )
