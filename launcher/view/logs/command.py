"""Implements `tandem logs`."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.text import Text

from launcher.view.logs.show import WantedLines, show, time_of
from launcher.view.run_view import make_console
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_files.run_folder import is_locked


def logs_command(
    run_dir: Path | None, services: Sequence[str], *, level: str, since: str, newest: int | None, follow: bool
) -> int:
    """Run `tandem logs`. run_dir: None: the current run. Returns: the exit code."""
    try:
        folder = current_run() if run_dir is None else run_dir
        since_s = time_of(since, time.time()) if since else 0.0
        wanted = WantedLines(services=services, level=level, since_s=since_s, newest=newest)
        show(folder, make_console(ends_with_reader=True), wanted, partial(is_locked, folder) if follow else None)
    except ConfigError as error:
        make_console(stderr=True).print(Text(str(error), style="bold red"))
        return EXIT_BAD_CONFIG
    return EXIT_OK
