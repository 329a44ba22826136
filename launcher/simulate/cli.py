"""The options of `tandem simulate`. Heavy imports happen inside, so that --help stays quick."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration, as for `tandem run`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="Override one key; repeat for more."),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option("--run", metavar="RUN_DIR", help="Take speeds and lengths from this run; repeat for more of them."),
]
Against = Annotated[
    Path | None,
    typer.Option(metavar="RUN_DIR", help="Simulate the iterations of this run but its first, and show it beside."),
]
Lengths = Annotated[
    str | None,
    typer.Option(metavar="FILE|FORMULA", help="Lengths, one a line; or lognormal:MEDIAN,P99[,MOST]; or constant:N."),
]
Slots = Annotated[int | None, typer.Option(min=1, help="Completions that a replica runs at a time.")]
StepMs = Annotated[float | None, typer.Option(min=0.0, help="Milliseconds of an engine's step.")]
RowMs = Annotated[float | None, typer.Option(min=0.0, help="Milliseconds that each running completion adds to it.")]
TrainS = Annotated[float | None, typer.Option(min=0.0, help="Seconds of a train step.")]
SyncS = Annotated[float | None, typer.Option(min=0.0, help="Seconds of a weight sync.")]
RewardS = Annotated[float | None, typer.Option(min=0.0, help="Seconds of the scoring of a batch.")]
Iterations = Annotated[int, typer.Option(min=1, max=100_000, help="Iterations that count.")]
Compare = Annotated[bool, typer.Option("--compare", help="Other schedules beside the configuration's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, with everything.")]


def simulate(
    config: Config,
    run: Runs = None,
    against: Against = None,
    lengths: Lengths = None,
    slots: Slots = None,
    step_ms: StepMs = None,
    row_ms: RowMs = None,
    train_s: TrainS = None,
    sync_s: SyncS = None,
    reward_s: RewardS = None,
    iterations: Iterations = 20,
    compare: Compare = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Predict what a schedule does: idle shares, ages, seconds an iteration. Starts nothing, needs no GPU.

    The coordinator's own schedule, dispatch and ledger run in virtual time; trainer, engines and weight sync are
    formulas. What neither --run nor an option says is guessed, and the output says so.

    \b
    Examples:
        tandem simulate -c my.yaml --run runs/my-run --compare
        tandem simulate -c my.yaml --lengths lognormal:800,8000,9600 --slots 128 --train-s 45 --compare
        tandem simulate -c my.yaml --run runs/my-run --set schedule.kind=async --set grpo.preset=decoupled --json
    """
    from launcher.simulate.command import Given, simulate_command

    given = Given(
        runs=run or (),
        against=against,
        lengths=lengths,
        slots=slots,
        step_ms=step_ms,
        row_ms=row_ms,
        train_s=train_s,
        sync_s=sync_s,
        reward_s=reward_s,
        iterations=iterations,
        compare=compare,
    )
    raise typer.Exit(simulate_command(config, overrides or [], given, as_json=as_json))
