"""The `tandem` command. Heavy imports happen inside the commands, so that --help stays quick."""

import io
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from launcher.plan.cli import plan

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""GRPO post-training of language models on this machine: Megatron trains, SGLang generates.

    \b
    tandem demo                      watch a tiny model learn to add
    tandem check -c my.yaml          everything wrong with a configuration
    tandem run -c my.yaml            train; results in runs/<name>/
    tandem run --resume runs/<name>  resume after Ctrl-C or a crash
    tandem top                       watch a running run, live
    tandem logs                      the logs of all its services, readable
    tandem compare runs/a runs/b     curves and settings of several runs
    tandem plan --model qwen3-32b    what a weight sync would move, and how long it would take

    Exit codes: 0 finished, 1 the run failed, 2 bad configuration or usage, 130 Ctrl-C, 143 SIGTERM.""",
)


class Level(StrEnum):
    """Levels of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_CONFIG = typer.Option(
    "--config",
    "-c",
    help=(
        "YAML file with the sections run, model, data, reward, grpo, trainer, rollout, sync, fleet, and the "
        "list trackers. Relative paths in it are relative to the file, but run.output_dir, which is relative to the "
        "working directory; ~ and $VARIABLES are expanded."
    ),
)
_File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="The configuration file, as with --config.", show_default=False)
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="SECTION.KEY=VALUE",
        help=(
            "Override one key; repeat for more. The value is YAML, e.g. --set grpo.group_size=8. Paths are relative "
            "to the working directory."
        ),
    ),
]


def _given_once(file: Path | None, config: Path | None) -> Path | None:
    """Return the configuration file, given with or without --config. Raises: typer.BadParameter: both ways."""
    if file is not None and config is not None:
        raise typer.BadParameter(f"two configuration files: {file} and --config {config}; give one")
    return file if config is None else config


@app.command()
def demo(overrides: _Set = None) -> None:
    """Post-train a tiny model on two-digit addition, with the real services, and watch it learn.

    Trainer with tensor parallel size 2, two SGLang replicas, Redis and coordinator, all started here. Held-out accuracy
    goes from 0.27 to above 0.95. Results are in ./runs/arithmetic (or arithmetic-2, ... if that is taken).

    \b
    Examples:
        tandem demo
        tandem demo --set run.iterations=5 --set trainer.tensor_parallel=1
    """
    from launcher.commands import demo_command

    raise typer.Exit(demo_command(overrides or []))


@app.command()
def run(
    file: _File = None,
    config: Annotated[Path | None, _CONFIG] = None,
    overrides: _Set = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_DIR",
            help="Resume this run from its newest complete checkpoint, with its own configuration (and --set).",
        ),
    ] = None,
) -> None:
    """Train a model as a configuration file says; everything is started here and ends with the run.

    The run leaves <output_dir>/<name>/ with config.resolved.yaml, metrics.jsonl, summary.json, reward.png, logs/,
    checkpoints/ and hf/ (the final policy). Earlier results are never overwritten: a second run of the same name gets
    the next free number. REDIS_URL, if set, is used; else a private Redis server is started.

    Ctrl-C saves and stops everything; a second Ctrl-C kills it.

    \b
    Examples:
        tandem run -c my.yaml
        tandem run -c my.yaml --set run.name=bigger --set grpo.group_size=32
        tandem run --resume runs/bigger --set run.iterations=200
    """
    from launcher.commands import run_command

    config = _given_once(file, config)
    if config is None and resume is None:
        raise typer.BadParameter("give a configuration file: tandem run -c my.yaml (or --resume RUN_DIR)")
    raise typer.Exit(run_command(config, overrides or [], resume=resume))


@app.command()
def check(
    file: _File = None,
    config: Annotated[Path | None, _CONFIG] = None,
    overrides: _Set = None,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=10_000.0,
            metavar="GIB",
            help="Memory of a GPU, for the estimate of each rank; default: the GPUs of this machine, if any.",
        ),
    ] = None,
) -> None:
    """Report everything that is wrong with a configuration, its model, its data and this machine; start nothing.

    With GPUs, or --gpu-memory-gib, also report how much memory a trainer rank and a rollout rank need.

    Every problem comes with its key, value and a suggestion. Exit code 0: a run can start; 2: it cannot.

    \b
    Examples:
        tandem check -c my.yaml --set trainer.tensor_parallel=4
        tandem check -c my.yaml --gpu-memory-gib 80
    """
    from launcher.commands import check_command

    if gpu_memory_gib is not None and math.isnan(gpu_memory_gib):
        raise typer.BadParameter("--gpu-memory-gib must be a number")
    config = _given_once(file, config)
    if config is None:
        raise typer.BadParameter("give a configuration file: tandem check -c my.yaml")
    raise typer.Exit(check_command(config, overrides or [], gpu_memory_gib=gpu_memory_gib))


app.command()(plan)


@app.command()
def status(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
) -> None:
    """Show the state of a run: ask its coordinator if it is running, else read its folder.

    \b
    Examples:
        tandem status runs/arithmetic
    """
    from launcher.commands import status_command

    raise typer.Exit(status_command(run_dir))


@app.command()
def top(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Draw it once, as when the output is not a terminal.")] = False,
) -> None:
    """Watch a running run live: curves, replicas, stages of the last weight syncs, alerts, messages. Leave with Ctrl-C.

    In a pod or container of the run it needs no folder: `python -m launcher top`.

    \b
    Examples:
        tandem top
        tandem top runs/arithmetic --once
    """
    from launcher.commands import top_command

    raise typer.Exit(top_command(run_dir, once=once))


@app.command()
def logs(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; default: the newest one in ./runs.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            "--service", metavar="NAME", help="Only this service, e.g. rollout-0, or rollout; repeat for more."
        ),
    ] = None,
    level: Annotated[Level, typer.Option("--level", help="Lowest level.")] = Level.INFO,
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
    from launcher.commands import logs_command

    raise typer.Exit(logs_command(run_dir, service or [], level=level.value, since=since, newest=newest, follow=follow))


@app.command()
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
    from launcher.commands import compare_command

    raise typer.Exit(compare_command(run_dirs, metric or [], smooth=smooth, out=out, last=last))


@app.command()
def version() -> None:
    """Print the versions of Tandem and of the engines that it runs."""
    from servicekit.versions import software_versions

    names = ("tandem", "torch", "sglang", "megatron-core", "transformers", "grpcio", "redis")
    for name, number in software_versions(names).items():
        typer.echo(f"{name} {number}")


def main() -> NoReturn:
    """Run the command as `app()` does, but end on Ctrl-C outside of a run with exit code 130 and no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # In an ASCII locale: print escapes instead of failing.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
