"""`tandem profile`: prints the profile of a train step, a line per rank, its parts, and what took most time."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report import make_console, reporting, table_of
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_files.profiles.folder import RankProfile, read_profiles, trace_path

_OPERATOR_CHARACTERS = 48
_TIMELINES = {"cuda": "GPU's kernels", "cpu": "host's operators"}


@reporting(usage=(PermissionError,))
def profile_command(run_dir: Path | None, *, step: int | None, rank: int | None, top: int) -> int:
    """Run `tandem profile`. Returns: the exit code."""
    run_dir = current_run() if run_dir is None else run_dir
    ranks = _of_step(read_profiles(run_dir), run_dir, step)
    _draw(make_console(), run_dir, ranks, _of_rank(ranks, rank), top)
    return EXIT_OK


def _of_step(profiles: Sequence[RankProfile], run_dir: Path, step: int | None) -> list[RankProfile]:
    """Choose the profiles of a step, by rank; None: the last step. Raises: ConfigError: there are none."""
    if not profiles:
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir} does not exist; give a run's folder, e.g. `tandem profile runs/arithmetic`")
        raise ConfigError(f"{run_dir} has no profiled step; run it with `--set profile.steps=1`")
    steps = sorted({profile.step for profile in profiles})
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise ConfigError(f"step {wanted} of {run_dir} was not profiled; there are: {', '.join(map(str, steps))}")
    return [profile for profile in profiles if profile.step == wanted]


def _of_rank(ranks: Sequence[RankProfile], rank: int | None) -> RankProfile:
    """Choose a rank's profile; None: that of the rank that computed longest. Raises: ConfigError: it has none."""
    if rank is None:
        return max(ranks, key=lambda profile: profile.compute_s)
    for profile in ranks:
        if profile.rank == rank:
            return profile
    known = ", ".join(str(profile.rank) for profile in ranks)
    raise ConfigError(f"rank {rank} was not profiled in step {ranks[0].step}; ranks with a profile: {known}")


def _draw(console: Console, run_dir: Path, ranks: Sequence[RankProfile], listed: RankProfile, top: int) -> None:
    """Print it.

    Args:
        ranks: the profiles of a step.
        listed: the one whose parts and operators are shown.
        top: most operators.
    """
    of = f"step {listed.step}, {len(ranks)} of {listed.world_size} ranks"
    console.print(Text(f"{run_dir}: {of}, the {_TIMELINES[listed.timeline]}", style="bold"))
    console.print(_shares(ranks))
    console.print()
    console.print(_parts(listed))
    console.print()
    console.print(_operators(listed, top))
    console.print(Text(f"trace: {trace_path(run_dir, listed.step, listed.rank)} (chrome://tracing, ui.perfetto.dev)"))


def _shares(ranks: Sequence[RankProfile]) -> Table:
    table = table_of("rank", "seconds", "recorded", "computing", "communication", "of it alone", "neither")
    for rank in ranks:
        parts = (rank.compute_s, rank.communication_s, rank.exposed_s, rank.idle_s)
        seconds = (f"{rank.seconds:.3f}", f"{rank.recorded_s:.3f}")
        table.add_row(str(rank.rank), *seconds, *(_share(part, rank.recorded_s) for part in parts))
    return table


def _parts(rank: RankProfile) -> Table:
    table = table_of(f"part of rank {rank.rank}'s step", "seconds", "share")
    for name, seconds in rank.parts.items():
        table.add_row(name, f"{seconds:.3f}", _share(seconds, rank.seconds))
    return table


def _operators(rank: RankProfile, top: int) -> Table:
    table = table_of(f"rank {rank.rank} spent most on", "calls", "seconds", "share")
    for operator in rank.operators[:top]:
        name = operator.name
        short = (
            name if len(name) <= _OPERATOR_CHARACTERS else f"{name[: _OPERATOR_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
        )
        table.add_row(short, str(operator.calls), f"{operator.seconds:.4f}", _share(operator.seconds, rank.recorded_s))
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "-"
