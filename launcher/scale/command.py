"""Implements `tandem scale`: leaves a wish for the launcher of a run, and watches until the run is as it says."""

import asyncio
import os
import re
import secrets
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.report import make_console, reporting
from launcher.run.scaling import why_not_configured
from launcher.run.supervisor import last_error
from launcher.view.evaluation import is_evaluation
from launcher.view.status import ask_status
from servicekit.errors import ConfigError, TandemError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tandem_files.run_config import LAUNCHED_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import (
    Wish,
    is_locked,
    read_identity,
    read_notes,
    read_scale,
    read_state,
    read_token,
    read_wish,
    write_scale,
)

_POLL_S = 0.5
# A launcher looks twice a second; one that restarts a trainer is busy with that for a while.
_ANSWER_S = 15.0


@reporting("not scaled: ", usage=(OSError,))
def scale_command(run_dir: Path, size: str, *, wait: bool) -> int:
    """Run `tandem scale`. wait: until exactly so many replicas serve, or run.startup_timeout_s have passed."""
    console = make_console()
    config, wish = _checked(run_dir, size)
    write_scale(run_dir, wish)
    if not is_locked(run_dir):
        console.print(Text(f"it does not run: `tandem run --resume {run_dir}` begins with {wish.replicas} replicas"))
        return EXIT_OK
    watched = _Watched(run_dir, wish, console, wait=wait)
    code, text = asyncio.run(watched.until_reached(config.run.startup_timeout_s))
    (make_console(stderr=True) if code else console).print(Text(text, style="bold red" if code else "bold green"))
    return code


def _checked(run_dir: Path, size: str) -> tuple[RunConfig, Wish]:
    """Check what is asked against the run's folder. Raises: ConfigError: why it cannot be."""
    what, _, number = size.partition("=")
    if what == "trainer":
        raise ConfigError(
            "the trainer's size is part of its run: stop it, and resume it with --set trainer.data_parallel=..."
        )
    if what != "rollout" or not re.fullmatch(r"\d{1,9}", number) or not int(number):
        raise ConfigError(f"{size!r} is not rollout=N, with N replicas, at least 1")
    if not (run_dir / RESOLVED_CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run's folder: it has no {RESOLVED_CONFIG}")
    if is_evaluation(run_dir):
        raise ConfigError(f"{run_dir} is an evaluation's")
    running = is_locked(run_dir)
    config = load_config(run_dir / (LAUNCHED_CONFIG if running else RESOLVED_CONFIG))
    identity = read_identity(run_dir)
    if identity is not None and not identity.is_launched:
        raise ConfigError(f"{run_dir} is not of `tandem run`: {_elsewhere(config, int(number))}")
    if (owner := run_dir.stat().st_uid) != os.geteuid():
        raise ConfigError(f"{run_dir} belongs to user id {owner}, who can scale it")
    scale = read_scale(run_dir)
    if running and (scale is None or identity is None or scale.launch_id != identity.launch_id):
        raise ConfigError(
            f"{run_dir} is run by an older release, which cannot scale: stop it, and resume it with this one"
        )
    if not running and read_state(run_dir).get("status") == "finished":
        more = f"--set run.iterations=... --set rollout.replicas={int(number)}"
        raise ConfigError(f"{run_dir} has finished; `tandem run --resume {run_dir} {more}` continues it")
    if why := why_not_configured(config, int(number)):
        raise ConfigError(why)
    return config, Wish(replicas=int(number), wish_id=secrets.token_hex(8))


def _elsewhere(config: RunConfig, replicas: int) -> str:
    fleet = config.fleet
    if fleet.kind == "kubernetes":
        return f"`kubectl scale {fleet.rollout_set_kind.lower()}/{fleet.rollout_set} --replicas={replicas}`"
    more = max(0, replicas - config.rollout.replicas)
    return f"with docker compose, `docker compose up --detach --no-deps --scale rollout={more} rollout`"


class _Watched:
    """A run that is scaled.

    Args:
        wish: ours.
        wait: until exactly so many serve; else until the launcher has answered.
    """

    def __init__(self, run_dir: Path, wish: Wish, console: Console, *, wait: bool) -> None:
        self._run_dir, self._wish, self._console, self._wait = run_dir, wish, console, wait
        self._names = [f"rollout-{index}" for index in range(wish.replicas)]
        self._serving: list[str] | None = None
        self._troubles: list[str] = []

    async def until_reached(self, timeout_s: float) -> tuple[int, str]:
        """Watch until there is an outcome. Returns: the exit code, and the last line."""
        begun_s = time.monotonic()
        while True:
            await self._ask()
            waited_s = time.monotonic() - begun_s
            if (outcome := self._outcome(waited_s)) is not None:
                return outcome
            if waited_s >= (timeout_s if self._wait else _ANSWER_S):
                return self._too_late(waited_s)
            await asyncio.sleep(_POLL_S)

    async def _ask(self) -> None:
        """Ask the coordinator who serves, and say what has changed; one that does not answer is asked again."""
        notes = read_notes(self._run_dir)
        if notes is None or not notes.coordinator:
            return
        try:
            status = await ask_status(notes.coordinator, read_token(self._run_dir))
        except TandemError:
            return
        serving, self._troubles = sorted(status.serving_replicas, key=_number), list(status.troubles)
        if serving != self._serving:
            self._console.print(Text(f"serving: {', '.join(serving) or 'none'}"))
        self._serving = serving

    def _outcome(self, waited_s: float) -> tuple[int, str] | None:
        newest, scale = read_wish(self._run_dir), read_scale(self._run_dir)
        is_answered = scale is not None and scale.wish_id == self._wish.wish_id
        if newest is not None and newest.wish_id != self._wish.wish_id:
            return EXIT_FAILED, f"another `tandem scale` has asked for {newest.replicas} replicas, which counts"
        if is_answered and scale is not None and scale.refused:
            return EXIT_BAD_CONFIG, f"not scaled: {scale.refused}"
        if not is_locked(self._run_dir):
            return EXIT_FAILED, f"the run has ended; a resume begins with {len(self._names)} replicas"
        if is_answered and self._serving == self._names:
            return EXIT_OK, f"{', '.join(self._names)} serve, after {waited_s:.0f} s"
        return (EXIT_OK, f"noted: the run gets {len(self._names)} replicas") if is_answered and not self._wait else None

    def _too_late(self, waited_s: float) -> tuple[int, str]:
        if not self._wait:
            return EXIT_OK, f"noted; the launcher has not answered within {waited_s:.0f} s"
        lines = [f"not so after {waited_s:.0f} s (run.startup_timeout_s)"]
        for name in sorted({*self._names} ^ {*(self._serving or [])}, key=_number):
            log = self._run_dir / "logs" / f"{name}.log"
            why = f"does not serve: {last_error(log) or 'no reason'}; log: {log}"
            lines.append(f"{name} {why if name in self._names else 'serves still'}")
        return EXIT_FAILED, "; ".join([*lines, *self._troubles])


def _number(name: str) -> tuple[int, str]:
    """Order rollout-10 behind rollout-9."""
    return len(name), name
