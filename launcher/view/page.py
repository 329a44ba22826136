"""`tandem page`: serves the run's page from its folder, after the run or beside it. Imports when it is called."""

import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coordinator.web.server import PageServer

_HOST = "127.0.0.1"


def page(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port on this machine; 0: any free one.")] = 0,
) -> None:
    """Serve the page of a run from its folder, until Ctrl-C: curves, times, samples. For a run that is over, too.

    \b
    Examples:
        tandem page
        tandem page runs/arithmetic --port 8080
    """
    from launcher.view.run_view import make_console
    from launcher.view.status import current_run
    from servicekit.errors import ConfigError
    from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG

    key = secrets.token_hex(16)
    try:
        run_dir = current_run() if run_dir is None else run_dir
        server = open_page(run_dir.absolute(), port, key)
    except ConfigError as error:
        make_console(stderr=True).print(str(error), style="bold red", markup=False)
        raise typer.Exit(EXIT_BAD_CONFIG) from None
    typer.echo(f"the page of {run_dir}: http://{_HOST}:{server.port}/#key={key}")
    typer.echo("Ctrl-C ends it")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background has it ignored
    try:
        threading.Event().wait()  # until a signal
    except KeyboardInterrupt:
        server.close()


def open_page(run_dir: Path, port: int, key: str) -> "PageServer":
    """Serve a run's page on loopback. Raises: ConfigError: it is not a run's folder; the port is taken."""
    from coordinator.web.folder import FolderSource
    from coordinator.web.samples import SamplePages
    from coordinator.web.server import DATA, EARLIER, SAMPLES, PageServer
    from tandem_files.samples.folder import SampleFolder

    source, samples = FolderSource(run_dir), SamplePages(SampleFolder(run_dir))
    answers = {DATA: source.picture, SAMPLES: samples.groups, EARLIER: samples.earlier}
    return PageServer(_HOST, port, answers, key=key, advice="choose another --port, or 0")
