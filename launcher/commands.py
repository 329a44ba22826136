"""Implements the commands; every function returns the exit code."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from coordinator.data.scan_cache import RowIndex, write_indices
from launcher.check.memory import memory_report
from launcher.check.preflight import preflight
from launcher.check.resume import note_model
from launcher.report import headline, make_console, print_pairs, print_problems, reporting
from launcher.view.run_view import RunView
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_config.loading import Draft, draft_config, dump_resolved
from tandem_config.problems import ConfigProblem, errors_only, problem
from tandem_config.schema import RunConfig
from tandem_files.atomic import write_bytes_atomic
from tandem_files.pace import remaining_s
from tandem_files.run_config import LAUNCHED_CONFIG, NEXT_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import Scale, claimed, locked
from weightsync.model.spec import ModelSpec

if TYPE_CHECKING:
    from launcher.run.run import RunRequest

T = TypeVar("T")


def check_command(
    config: Path, overrides: Sequence[str], *, gpu_memory_gib: float | None, host_memory_gib: float | None = None
) -> int:
    """Run `tandem check`.

    Args:
        gpu_memory_gib: memory of a GPU; None: as nvidia-smi reports it.
        host_memory_gib: memory of the machine that has those GPUs; None: another's, which is not compared.
    """
    from launcher.check.schedule import schedule_report  # here: a run needs no simulation

    console = make_console()
    draft = draft_config(config, overrides)
    memory = memory_report(draft, gpu_memory_gib, host_memory_gib)
    notes: list[str] = []
    problems = [*preflight(draft, redis_url=redis_url(), notes=notes), *memory.problems]
    foreseen, unsuitable = schedule_report(draft)
    problems += unsuitable
    print_problems(console, problems)
    for line in [*notes, *memory.lines, *foreseen]:
        console.print(Text(line))
    console.print(Text(f"{config}: {headline(problems)}", style="bold"))
    return EXIT_BAD_CONFIG if errors_only(problems) else EXIT_OK


def run_command(config: Path | None, overrides: Sequence[str], *, resume: Path | None) -> int:
    """Run `tandem run` or `tandem demo`. resume: folder of the run to resume."""
    console, complaints = make_console(), make_console(stderr=True)
    resume = None if resume is None else resume.absolute()
    draft, scale = _scaled(config, overrides, resume, console)
    indices: list[RowIndex] = []
    problems = preflight(draft, redis_url=redis_url(), resume=resume, indices=indices)
    return start(
        complaints,
        draft,
        problems,
        prepare=lambda stack, checked: _prepare(stack, checked, resume, indices, scale),
        run=lambda request: _run(request, console),
    )


def start(
    complaints: Console,
    draft: Draft,
    problems: Sequence[ConfigProblem],
    *,
    prepare: Callable[[ExitStack, RunConfig], T],
    run: Callable[[T], int],
) -> int:
    """Print the problems of a configuration; without errors among them prepare a folder and run.

    Args:
        prepare: locks the folder until the stack ends; ConfigError and OSError mean that it cannot be used.
        run: gets what `prepare` returns. Returns: the exit code.
    Returns: the exit code.
    """
    print_problems(complaints, problems)
    if draft.config is None or errors_only(problems):
        complaints.print(Text(f"not started: {headline(problems)}", style="bold red"))
        return EXIT_BAD_CONFIG
    with ExitStack() as stack:
        try:
            prepared = prepare(stack, draft.config)
        except (ConfigError, OSError) as error:
            complaints.print(Text(f"not started: {error}", style="bold red"))
            return EXIT_BAD_CONFIG
        return run(prepared)


def write_config(run_dir: Path, config: RunConfig, *names: str) -> None:
    """Write the configuration into the run's folder, as each of these files. Raises: OSError."""
    (run_dir / LAUNCHED_CONFIG).parent.mkdir(exist_ok=True)
    for name in names:
        write_bytes_atomic(run_dir / name, dump_resolved(config).encode())


def demo_command(overrides: Sequence[str]) -> int:
    """Run `tandem demo`: the arithmetic example of the repository."""
    path = Path(__file__).resolve().parent.parent / "examples" / "arithmetic" / "arithmetic.yaml"
    if not path.is_file():
        text = f"{path} does not exist: the demo needs a checkout of the repository, installed with `pip install -e .`"
        make_console(stderr=True).print(Text(text, style="bold red"))
        return EXIT_BAD_CONFIG
    return run_command(path, overrides, resume=None)


@reporting()
def status_command(run_dir: Path | None) -> int:
    """Run `tandem status`. run_dir: None: the current run."""
    from launcher.view.status import current_run, describe

    print_pairs(make_console(), describe(current_run() if run_dir is None else run_dir))
    return EXIT_OK


@reporting()
def top_command(run_dir: Path | None, *, once: bool) -> int:
    """Run `tandem top`. run_dir: None: the current run."""
    from launcher.view.status import current_run
    from launcher.view.top import show

    show(current_run() if run_dir is None else run_dir, make_console(), once=once)
    return EXIT_OK


def _scaled(
    config: Path | None, overrides: Sequence[str], resume: Path | None, console: Console
) -> tuple[Draft, Scale | None]:
    """Draft the configuration, that of a resumed run with as many replicas as it was scaled to."""
    from launcher.run.scaling import at_resume

    draft = _draft(config, overrides, resume)
    if resume is None or draft.config is None:
        return draft, None
    try:
        scale, line = at_resume(resume, draft.config.rollout.replicas, overrides)
    except ConfigError as error:
        return Draft(config=None, problems=[problem("--resume", resume, str(error))], bad_keys=frozenset()), None
    if line:
        console.print(Text(line))
    if scale.replicas != scale.configured:
        draft = _draft(config, [*overrides, f"rollout.replicas={scale.replicas}"], resume)
    return draft, scale


def _draft(config: Path | None, overrides: Sequence[str], resume: Path | None) -> Draft:
    """Draft the configuration; a resumed run keeps its folder, whatever run.name and run.output_dir are in the file."""
    if resume is None:
        return draft_config(config, overrides)
    file = resume / RESOLVED_CONFIG if config is None else config
    if config is None and not file.is_file():
        return Draft(config=None, problems=[_not_a_run(resume)], bad_keys=frozenset())
    return draft_config(file, [*overrides, f"run.name={resume.name}", f"run.output_dir={resume.parent}"])


def _not_a_run(folder: Path) -> ConfigProblem:
    message = f"has no {RESOLVED_CONFIG}, so it is not a run's folder" if folder.is_dir() else "no such folder"
    return problem("--resume", folder, message, "give a folder that `tandem run` has made")


def _prepare(
    stack: ExitStack, config: RunConfig, resume: Path | None, indices: list[RowIndex], scale: Scale | None
) -> "RunRequest":
    """Lock the run's folder until `stack` ends, and write the configuration files and the data's indices into it.

    Args:
        indices: emptied, because they would take memory as long as the run.
        scale: of a resume; the files keep the number that is configured.
    Raises: ConfigError, OSError: the folder cannot be locked or written to.
    """
    from launcher.run.run import RunRequest

    if resume is None:
        run_dir = stack.enter_context(claimed(config.run.output_dir, config.run.name))
    else:
        run_dir = resume
        stack.enter_context(locked(run_dir))
    config = config.changed("run", name=run_dir.name)
    filed = config if scale is None else config.changed("rollout", replicas=scale.configured)
    write_config(run_dir, filed, LAUNCHED_CONFIG, RESOLVED_CONFIG if resume is None else NEXT_CONFIG)
    write_indices(run_dir, indices)
    indices.clear()
    if resume is None:
        note_model(run_dir, ModelSpec.from_folder(config.model.path))
    return RunRequest(
        config=config, run_dir=run_dir, redis_url=redis_url_with_files(), resume=resume is not None, scale=scale
    )


def _run(request: "RunRequest", console: Console) -> int:
    """Run to the end and print the outcome, even if the plot or the summary fails. Returns: the exit code."""
    from launcher.run.run import launch
    from launcher.view.summary import plot_rewards, print_summary

    settings = request.config.run
    left_s = partial(
        remaining_s,
        total=settings.iterations,
        evaluate_every=settings.evaluate_every,
        checkpoint_every=settings.checkpoint_every,
    )
    rewards = sorted(request.config.reward, key=lambda section: not section.accuracy)
    weights = {section.label: section.weight for section in rewards}
    view = RunView(console, settings.iterations, left_s, weights)
    view.print_line(f"run {request.run_dir.name} in {request.run_dir}", "bold")
    outcome = launch(request, view)
    try:
        plot_rewards(request.run_dir)
        if outcome.code == 0:
            print_summary(console, request.run_dir)
    except Exception as error:  # noqa: BLE001 - a failed plot must not hide the outcome: the disk may be full, matplotlib broken
        view.warning(f"reward.png or the summary failed: {error}")
    style = "bold red" if outcome.code else "bold yellow" if outcome.troubles else "bold green"
    view.print_line(outcome.text, style)
    return outcome.code


def redis_url() -> str | None:
    """Return REDIS_URL; None: it is not set."""
    return os.environ.get("REDIS_URL") or None


def redis_url_with_files() -> str | None:
    """Add the TLS files to REDIS_URL. Raises: ConfigError: they do not belong to such a URL."""
    from servicekit.redis.client import with_tls_files

    url = redis_url()
    return None if url is None else with_tls_files(url, os.environ)
