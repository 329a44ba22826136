"""The command lines of what shows a run. Imports when a command is called, so that --help stays quick."""

import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from coordinator.web.server import PageServer

_HOST = "127.0.0.1"
Level = Literal["debug", "info", "warning", "error"]
RunDir = Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")]


def samples(
    run_dir: RunDir = None,
    iteration: Annotated[
        str, typer.Option("--iteration", "-i", metavar="N|last", help="Iteration; 0: before the first one.")
    ] = "last",
    kind: Annotated[str | None, typer.Option("--kind", "-k", help="train, heldout, or another evaluation set.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="All samples of a group: its id, or a part of it (g3, row77).")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Samples with this text in prompt or completion.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Samples that a reward could not score, with why.")] = False,
    worst: Annotated[int, typer.Option("--worst", min=0, metavar="K", help="The K of least reward.")] = 0,
    best: Annotated[int, typer.Option("--best", min=0, metavar="K", help="The K of greatest reward.")] = 0,
    longest: Annotated[int, typer.Option("--longest", min=0, metavar="K", help="The K of most tokens.")] = 0,
    shortest: Annotated[int, typer.Option("--shortest", min=0, metavar="K", help="The K of fewest tokens.")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="Whole texts; else the middle of long ones is left out.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object per sample and line, with everything.")
    ] = False,
) -> None:
    """Show samples of a run: prompt, completion, reward by part, advantage, length, versions.

    Without options: the two best and the two worst of the last iteration. While the run is running too.

    \b
    Examples:
        tandem samples
        tandem samples runs/arithmetic --iteration 40 --worst 5
        tandem samples runs/arithmetic --kind heldout --grep 'I cannot'
        tandem samples runs/arithmetic --group g3 --json
    """
    if iteration != "last" and not iteration.isdecimal():
        raise typer.BadParameter(f"--iteration {iteration}: give a number, or last")
    from launcher.view.samples.choose import SampleQuery
    from launcher.view.samples.draw import samples_command

    ends = [("best", best), ("worst", worst), ("longest", longest), ("shortest", shortest)]
    wanted = SampleQuery(
        iteration=None if iteration == "last" else int(iteration),
        kind=kind,
        group=group,
        pattern=grep,
        failed=failed,
        ends=[(name, count) for name, count in ends if count],
    )
    raise typer.Exit(samples_command(run_dir, wanted, full=full, as_json=as_json))


def profile(
    run_dir: RunDir = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Train step; default: the last one that was profiled.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Rank whose operators are listed; default: the busiest.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, metavar="K", help="Operators that are listed.")] = 12,
) -> None:
    """Show where the time of a profiled train step went: computing, communication, neither, parts, operators.

    `profile.steps` in the configuration says which steps a run profiles. Their traces open in Perfetto
    and chrome://tracing.

    \b
    Examples:
        tandem run -c my.yaml --set profile.steps=1
        tandem profile
        tandem profile runs/arithmetic --step 2 --rank 1 --top 30
    """
    from launcher.view.profile import profile_command

    raise typer.Exit(profile_command(run_dir, step=step, rank=rank, top=top))


def logs(
    run_dir: RunDir = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            "--service", metavar="NAME", help="Only this service, e.g. rollout-0, or rollout; repeat for more."
        ),
    ] = None,
    level: Annotated[Level, typer.Option("--level", help="Lowest level.")] = "info",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only later lines: 90s, 10m, 2h, 1d ago, or 14:30.")
    ] = "",
    newest: Annotated[int | None, typer.Option("--newest", "-n", min=1, metavar="N", help="Only the newest N.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is added too, until the run ends.")
    ] = False,
) -> None:
    """Print the logs of a run's services as readable lines, by time; tracebacks as such.

    \b
    Examples:
        tandem logs runs/arithmetic --level warning
        tandem logs --service rollout --since 10m --follow
    """
    from launcher.view.logs.show import logs_command

    raise typer.Exit(logs_command(run_dir, service or [], level=level, since=since, newest=newest, follow=follow))


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="The runs' folders.", metavar="RUN_DIR...")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Figure of metrics.jsonl; repeat for more. Default: the reward."),
    ] = None,
    smooth: Annotated[
        float, typer.Option("--smooth", min=0.0, max=0.999, help="Smoothing in the picture: weight of the past.")
    ] = 0.6,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="Mean over the newest N values.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also draw the curves: picture.png, .svg or .pdf.")
    ] = None,
) -> None:
    """Compare runs: first, final, best and mean figures, times, settings that differ; optionally a picture.

    \b
    Examples:
        tandem compare runs/a runs/b --out curves.png
        tandem compare runs/* --metric reward_mean --metric entropy
    """
    from launcher.view.compare.table import compare_command

    raise typer.Exit(compare_command(run_dirs, metric or [], smooth=smooth, out=out, last=last))


def page(
    run_dir: RunDir = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port on this machine; 0: any free one.")] = 0,
) -> None:
    """Serve the page of a run from its folder, until Ctrl-C: curves, times, samples. For a run that is over, too.

    \b
    Examples:
        tandem page
        tandem page runs/arithmetic --port 8080
    """
    from launcher.report import reporting

    raise typer.Exit(reporting()(_serve)(run_dir, port))


def _serve(run_dir: Path | None, port: int) -> int:
    from launcher.view.status import current_run

    key, run_dir = secrets.token_hex(16), current_run() if run_dir is None else run_dir
    server = open_page(run_dir.absolute(), port, key)
    typer.echo(f"the page of {run_dir}: http://{_HOST}:{server.port}/#key={key}")
    typer.echo("Ctrl-C ends it")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background has it ignored
    try:
        threading.Event().wait()  # until a signal
    except KeyboardInterrupt:
        server.close()
    return 0


def ledger(
    run_dir: RunDir = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit code 1 if a file is damaged, or says what cannot be true.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON object.")] = False,
) -> None:
    """Show what became of every sample that a run has begun, from the files of its ledger. While it is running, too.

    \b
    Examples:
        tandem ledger runs/arithmetic
        tandem ledger runs/arithmetic --verify
    """
    from launcher.view.ledger import ledger_command

    raise typer.Exit(ledger_command(run_dir, verify=verify, as_json=as_json))


def open_page(run_dir: Path, port: int, key: str) -> "PageServer":
    """Serve a run's page on loopback. Raises: ConfigError: it is not a run's folder; the port is taken."""
    from coordinator.web.folder import FolderSource
    from coordinator.web.samples import SamplePages
    from coordinator.web.server import DATA, EARLIER, SAMPLES, PageServer
    from tandem_files.samples.folder import SampleFolder

    source, samples = FolderSource(run_dir), SamplePages(SampleFolder(run_dir))
    answers = {DATA: source.picture, SAMPLES: samples.groups, EARLIER: samples.earlier}
    return PageServer(_HOST, port, answers, key=key, advice="choose another --port, or 0")
