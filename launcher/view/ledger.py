"""`tandem ledger`: what became of each sample of a run, and whether its files prove that each was trained once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.report import make_console, reporting, table_of
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from tandem_files.checkpoints import COORDINATOR_FILE, list_complete
from tandem_files.ledger.account import FATES
from tandem_files.ledger.reading import LedgerContent, read_ledger
from tandem_files.run_folder import run_id_of

_PROVEN = "each sample begun is trained once, filtered, dropped by name or under way; no prompt is skipped"


@reporting(usage=(OSError,))
def ledger_command(run_dir: Path | None, *, verify: bool, as_json: bool) -> int:
    """Run `tandem ledger`.

    Args:
        run_dir: None: the current run.
        verify: fail if anything is damaged or cannot be true.
    Returns: the exit code.
    """
    console = make_console()
    run_dir = current_run() if run_dir is None else run_dir
    checkpoints = list_complete(run_dir)  # first: a run that works notes each before it is complete
    ledger = read_ledger(run_dir, run_id_of(run_dir))
    if not ledger.heads:
        raise ConfigError(f"{run_dir} has no ledger: it is of a release before it, or no run's")
    problems = [*ledger.problems, *_foreign_checkpoints(checkpoints, ledger)]
    if as_json:
        print(json.dumps(_summary(ledger, problems), indent=1))
    else:
        console.print(_table(ledger))
        position = ledger.account.position
        steps = f"the last step is {position.step_id or 'none'}; digest of all steps {position.digest or 'none'}"
        console.print(
            Text(f"{_resumes(ledger)}; {ledger.num_records:,} records in {len(ledger.heads)} segments; {steps}")
        )
        for problem in problems:
            console.print(Text(problem, style="bold red"))
        if verify:
            console.print(
                Text(f"not proven: {len(problems)} problems" if problems else f"proven: {_PROVEN}", style="bold")
            )
    return EXIT_FAILED if verify and problems else EXIT_OK


def _foreign_checkpoints(checkpoints: Sequence[tuple[int, Path]], ledger: LedgerContent) -> list[str]:
    """Say which checkpoints were made after other train steps than the ledger has, or after its end."""
    found, last = [], ledger.account.position.iteration
    for iteration, folder in checkpoints:
        digest = ledger.checkpoints.get(iteration)
        if digest is None and iteration > last:
            found.append(f"{folder} is of iteration {iteration}, and the ledger ends with iteration {last}")
            continue
        try:
            state = json.loads((folder / COORDINATOR_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if folder.exists():  # else the run has removed it meanwhile
                found.append(f"{folder / COORDINATOR_FILE} cannot be read: {error}")
            continue
        if digest is not None and state.get("steps_digest") != digest:
            found.append(f"{folder} was made after other train steps than the ledger has for it")
    return found


def _summary(ledger: LedgerContent, problems: list[str]) -> dict[str, Any]:
    account = ledger.account
    return {
        "samples": {name: num for name, num in sorted(account.counts.items()) if num},
        "under_way": account.under_way,
        "position": vars(account.position),
        "resumes": ledger.resumes,
        "segments": sorted(ledger.heads),
        "records": ledger.num_records,
        "problems": problems,
    }


def _table(ledger: LedgerContent) -> Table:
    table, counts = table_of("samples", "number", "why", texts=["why"], wraps=True), ledger.account.counts
    table.add_row("begun", f"{counts['begun']:,}", "")
    for fate in FATES:
        whys = {name: num for name, num in sorted(counts.items()) if name.partition(":")[0] == fate and num}
        for name, num in (whys or {fate: 0}).items():
            table.add_row(fate, f"{num:,}", name.partition(": ")[2])
    table.add_row("under way", f"{ledger.account.under_way:,}", "")
    if counts["returned"]:
        table.add_row("returned", f"{counts['returned']:,}", "in steps that were undone or not done; counted above")
    return table


def _resumes(ledger: LedgerContent) -> str:
    places = [str(resume["iteration"]) for resume in ledger.resumes]
    return f"resumed after iterations {', '.join(places)}" if places else "no resume since the oldest segment"
