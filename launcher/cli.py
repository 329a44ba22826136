"""The `tandem` command. Heavy imports happen inside the commands, so that --help stays quick."""

import io
import math
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from launcher.deploy.cli import deploy
from launcher.init.cli import init
from launcher.plan.cli import plan
from launcher.scale.cli import scale
from launcher.score.cli import score
from launcher.simulate.cli import simulate
from launcher.view.cli import RunDir, compare, ledger, logs, page, profile, samples

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""GRPO post-training of language models on this machine: Megatron trains, SGLang generates.

    \b
    tandem demo                      watch a tiny model learn to add
    tandem init --model DIR --data FILE    write my first configuration
    tandem check -c my.yaml          everything wrong with a configuration
    tandem score -c my.yaml FILE     what its rewards give to completions of mine
    tandem run -c my.yaml            train; results in runs/<name>/
    tandem run --resume runs/<name>  resume after Ctrl-C or a crash
    tandem top                       watch a running run, live
    tandem scale runs/<name> rollout=4    more or fewer replicas, while it runs
    tandem evaluate --model runs/<name>/hf --data heldout.jsonl
    tandem logs                      the logs of all services of a run
    tandem compare runs/a runs/b     curves, times and settings of several runs
    tandem export runs/<name> --out my-model    a Hugging Face folder from a checkpoint
    tandem import my.yaml --out start    a trainer checkpoint from the model, at the run's parallel sizes
    tandem checkpoints runs/<name>   what its checkpoints hold, and whether they are undamaged
    tandem samples                   prompts, completions and rewards of a run
    tandem ledger runs/<name>        what became of each of its samples
    tandem profile                   where the time of a profiled train step went
    tandem page                      the page of a run, also when it is over
    tandem deploy new my-run -c my.yaml    the run's overlay for Kubernetes
    tandem plan --model qwen3-32b    what a weight sync would move, and how long it would take
    tandem simulate -c my.yaml       what a schedule would do: who idles, how old samples are

    Exit codes: 0 finished, 1 the run failed, 2 bad configuration or usage, 130 Ctrl-C, 143 SIGTERM.""",
)

_CONFIG = typer.Option(
    "--config",
    "-c",
    help=(
        "YAML file with the sections run, model, data, reward, grpo, ... (docs/configuration.md). Relative paths in it "
        "are relative to the file, run.output_dir to the working directory; ~ and $VARIABLES are expanded."
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

    With GPUs, or --gpu-memory-gib, also report how much memory a trainer rank and a rollout rank need. With
    schedule.kind one_step_off or async, also say who will idle and how old samples will be, if lengths are usual ones.

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


app.command()(init)
app.command()(plan)
app.command()(scale)
app.command()(score)
app.command()(simulate)
app.command()(samples)
app.command()(profile)
app.command()(logs)
app.command()(compare)
app.command()(page)
app.command()(ledger)
app.add_typer(deploy, name="deploy")


@app.command()
def evaluate(
    model: Annotated[Path | None, typer.Option("--model", metavar="DIR", help="Hugging Face model folder.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="FILE", help="Data file, a set of its own; repeat for more.")
    ] = None,
    config: Annotated[Path | None, _CONFIG] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Completions per prompt of --data, k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Of --data; default: 0, with several samples 1.")
    ] = None,
    overrides: _Set = None,
) -> None:
    """Evaluate a model on data files: mean@k, pass@k and maj@k with 95 % intervals; trains nothing.

    Starts Redis and the replicas only, which load the folder themselves. The configured reward scores: exact_match,
    unless -c or --set reward.kind=... say otherwise. Without -c the columns of prompt and answer are found in the
    first row, as `tandem init` does, or --set data.prompt_key=COLUMN. Results: runs/evaluate-<model>/evaluation.json.

    \b
    Examples:
        tandem evaluate --model runs/arithmetic/hf --data heldout.jsonl
        tandem evaluate --model my-model --data a.jsonl --data b.jsonl --samples 8 -s reward.kind=math_verify
        tandem evaluate -c my.yaml --model runs/mine/hf
    """
    from launcher.evaluate import EvaluationOptions, evaluate_command

    if config is None and (model is None or not data):
        raise typer.BadParameter("give a model and data: tandem evaluate --model DIR --data FILE (or -c my.yaml)")
    raise typer.Exit(
        evaluate_command(
            EvaluationOptions(
                model=model,
                data=data or [],
                config=config,
                samples=samples,
                temperature=temperature,
                overrides=overrides or [],
            )
        )
    )


@app.command()
def status(run_dir: RunDir = None) -> None:
    """Show the state of a run: ask its coordinator if it is running, else read its folder.

    \b
    Examples:
        tandem status runs/arithmetic
    """
    from launcher.commands import status_command

    raise typer.Exit(status_command(run_dir))


@app.command()
def top(
    run_dir: RunDir = None,
    once: Annotated[bool, typer.Option("--once", help="Draw it once, as when the output is not a terminal.")] = False,
) -> None:
    """Watch a running run live: curves, replicas, stages of the last weight syncs, alerts, messages. Leave with Ctrl-C.

    A run that is over is drawn once, from its folder.
    In a pod or container of the run it needs no folder: `python -m launcher top`.

    \b
    Examples:
        tandem top
        tandem top runs/arithmetic --once
    """
    from launcher.commands import top_command

    raise typer.Exit(top_command(run_dir, once=once))


@app.command("import")
def import_(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; an earlier import is replaced.")],
    file: _File = None,
    config: Annotated[Path | None, _CONFIG] = None,
    overrides: _Set = None,
) -> None:
    """Write model.path as a checkpoint of the trainer at the configuration's parallel sizes; starts nothing.

    trainer.initial_checkpoint lets a run start from it: each rank then reads its own file. It holds weights only, in
    model.dtype, and needs memory for one tensor at a time.

    \b
    Examples:
        tandem import my.yaml --out start
        tandem import my.yaml --out tp8 --set trainer.tensor_parallel=8
        tandem run my.yaml --set trainer.initial_checkpoint=tp8 --set trainer.tensor_parallel=8
    """
    from launcher.checkpoints import import_command

    given = _given_once(file, config)
    if given is None:
        raise typer.BadParameter("give a configuration: tandem import my.yaml --out DIR")
    raise typer.Exit(import_command(given, overrides or [], out))


@app.command()
def export(
    run_dir: Annotated[Path | None, typer.Argument(help="The run's folder; none: --checkpoint is a folder.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write; an earlier export is replaced.")
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test", metavar="DIR", help="Write nothing: compare names, shapes and numbers with this folder."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Of --test: how far apart numbers may be; the exit code is 1 beyond it.")
    ] = 0.0,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="last|best|N|DIR",
            help="The newest checkpoint, the best one, that of iteration N, or a checkpoint's own folder.",
        ),
    ] = "last",
    form: Annotated[
        Literal["hf", "dist"],
        typer.Option("--format", help="hf: a Hugging Face folder. dist: megatron-core's dist_checkpointing."),
    ] = "hf",
    dtype: Annotated[
        Literal["same", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights, rounded as torch does; same: the checkpoint's."),
    ] = "same",
    config: Annotated[Path | None, _CONFIG] = None,
    overrides: _Set = None,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder, with its tokenizer; trains and starts nothing.

    Its weights are those that the trainer would write into hf/ at that iteration, bit by bit. Needs memory for one file
    of weights (5 GB), and no GPU. The run may be running, stopped or finished.

    \b
    Examples:
        tandem export runs/my-run --out my-model
        tandem export runs/my-run --checkpoint 40 --out at-40 --dtype bfloat16
        tandem export --checkpoint tp8 -c my.yaml --out my-model
        tandem export runs/my-run --test my-model --tolerance 1e-6
        tandem export runs/my-run --out for-megatron --format dist
        tandem export runs/my-run --out my-model --set model.path=/new/place/of/the/model
    """
    from launcher.checkpoints import export_command
    from trainer_service.export import ExportSource

    source = ExportSource(run_dir=run_dir, checkpoint=checkpoint, config=config, overrides=overrides or [], dtype=dtype)
    raise typer.Exit(export_command(source, out, test, form=form, tolerance=tolerance))


@app.command()
def checkpoints(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder; the run may be running, stopped or finished.")],
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the shards to compare their digests.")] = False,
) -> None:
    """List a run's checkpoints: what each holds, which layout wrote it, and whether its files are as they were written.

    The exit code is 1 if a complete one is damaged; what is damaged is named by file and tensor.

    \b
    Examples:
        tandem checkpoints runs/my-run
        tandem checkpoints runs/my-run --quick
    """
    from launcher.checkpoints import checkpoints_command

    raise typer.Exit(checkpoints_command(run_dir, deep=not quick))


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
