"""Implements `tandem profile`."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from launcher.view.profile.draw import draw
from launcher.view.run_view import make_console
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_files.profiles.folder import RankProfile, read_profiles


def profile_command(run_dir: Path | None, *, step: int | None, rank: int | None, top: int) -> int:
    """Run `tandem profile`. Returns: the exit code."""
    try:
        run_dir = current_run() if run_dir is None else run_dir
        ranks = of_step(read_profiles(run_dir), run_dir, step)
        listed = of_rank(ranks, rank)
    except (ConfigError, PermissionError) as error:
        make_console(stderr=True).print(Text(str(error), style="bold red"))
        return EXIT_BAD_CONFIG
    draw(make_console(), run_dir, ranks, listed, top)
    return EXIT_OK


def of_step(profiles: Sequence[RankProfile], run_dir: Path, step: int | None) -> list[RankProfile]:
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


def of_rank(ranks: Sequence[RankProfile], rank: int | None) -> RankProfile:
    """Choose a rank's profile; None: that of the rank that computed longest. Raises: ConfigError: it has none."""
    if rank is None:
        return max(ranks, key=lambda profile: profile.compute_s)
    for profile in ranks:
        if profile.rank == rank:
            return profile
    known = ", ".join(str(profile.rank) for profile in ranks)
    raise ConfigError(f"rank {rank} was not profiled in step {ranks[0].step}; ranks with a profile: {known}")
