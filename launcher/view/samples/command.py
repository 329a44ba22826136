"""Implements `tandem samples`."""

from pathlib import Path

from rich.text import Text

from launcher.view.run_view import make_console
from launcher.view.samples.choose import SampleQuery, choose
from launcher.view.samples.draw import draw, draw_json
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_files.samples.folder import SampleFolder


def samples_command(run_dir: Path | None, wanted: SampleQuery, *, full: bool, as_json: bool) -> int:
    """Run `tandem samples`. run_dir: None: the current run. Returns: the exit code."""
    try:
        run_dir = current_run() if run_dir is None else run_dir
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir} does not exist; give a run's folder, e.g. `tandem samples runs/arithmetic`")
        chosen = choose(SampleFolder(run_dir), wanted)
    except (ConfigError, PermissionError) as error:
        make_console(stderr=True).print(Text(str(error), style="bold red"))
        return EXIT_BAD_CONFIG
    if as_json:
        draw_json(make_console(), chosen)
    else:
        draw(make_console(), run_dir, chosen, full=full)
    return EXIT_OK
