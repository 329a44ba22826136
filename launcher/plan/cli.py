"""The options of `tandem plan`. Heavy imports happen inside, so that --help stays quick."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from weightsync.plans.cost import Speeds


# ---- what is moved, from where to where ----

Model = Annotated[
    str, typer.Option(metavar="MODEL", help="A config.json, its folder, or a built-in name such as qwen3-32b.")
]
TrainerSizes = Annotated[
    str,
    typer.Option(
        metavar="SIZES",
        help=(
            "tp, pp, dp, cp, ep, etp, vpp, first, last (layers of those stages), embedding=1, loss=1 (each counts "
            "as a layer). Sizes not given are 1, or chosen so that the model fits."
        ),
    ),
]
RolloutSizes = Annotated[str, typer.Option(metavar="SIZES", help="tp, and ep of its ranks.")]
Replicas = Annotated[int, typer.Option(min=1, max=100_000, help="Rollout replicas.")]
TravelDtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type in which weights are sent.")]
BucketMib = Annotated[
    float | None,
    typer.Option(help="Largest message, in MiB; by default 256 divided by the replicas, at least 4, as between GPUs."),
]

# ---- how fast the machines are ----

TrainerGbps = Annotated[float, typer.Option(min=1e-6, help="Link of a trainer rank, in Gbit/s.")]
RolloutGbps = Annotated[float, typer.Option(min=1e-6, help="Link of a rollout rank, in Gbit/s.")]
LatencyUs = Annotated[float, typer.Option(min=0.0, help="Latency of a message, in microseconds.")]
RpcMs = Annotated[float, typer.Option(min=0.0, help="A call of a phase, there and back, in milliseconds.")]
CopyGbps = Annotated[float, typer.Option(min=1e-6, help="Packing and unpacking, in Gbit/s per rank.")]
DigestGbps = Annotated[float, typer.Option(min=1e-6, help="Digests of payloads, in Gbit/s per rank.")]

# ---- what is printed ----

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Simulate = Annotated[bool, typer.Option("--simulate", help="Simulate the round event by event, too.")]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="FAULT",
        help=(
            "For the simulation: slow:REPLICA=FACTOR, or kill:REPLICA@PHASE, or kill:REPLICA@SECONDS; repeat for "
            "more. REPLICA is a number from 0, in chain order."
        ),
    ),
]


def plan(
    model: Model,
    trainer: TrainerSizes = "tp=1",
    rollout: RolloutSizes = "tp=1",
    replicas: Replicas = 1,
    dtype: TravelDtype = "bfloat16",
    bucket_mib: BucketMib = None,
    trainer_gbps: TrainerGbps = 400.0,
    rollout_gbps: RolloutGbps = 400.0,
    latency_us: LatencyUs = 20.0,
    rpc_ms: RpcMs = 1.0,
    copy_gbps: CopyGbps = 4000.0,
    digest_gbps: DigestGbps = 800.0,
    as_json: AsJson = False,
    simulate: Simulate = False,
    faults: Faults = None,
) -> None:
    """Predict what a weight sync moves, between which ranks, and how long it takes. Needs no GPU.

    \b
    Examples:
        tandem plan --model qwen3-32b --trainer tp=8 --rollout tp=4 --replicas 16
        tandem plan --model qwen3-235b-a22b --trainer tp=4,pp=8,ep=16,dp=16 --rollout tp=8 --replicas 64 --json
        tandem plan --model my-model/ --replicas 8 --simulate --fault slow:3=4
    """
    from launcher.plan.command import plan_command

    code = plan_command(
        model=model,
        trainer=trainer,
        rollout=rollout,
        replicas=replicas,
        dtype=dtype,
        bucket_mib=bucket_mib,
        speeds=_speeds(trainer_gbps, rollout_gbps, latency_us, rpc_ms, copy_gbps, digest_gbps),
        as_json=as_json,
        simulate=simulate,
        faults=faults or [],
    )
    raise typer.Exit(code)


def _speeds(
    trainer_gbps: float, rollout_gbps: float, latency_us: float, rpc_ms: float, copy_gbps: float, digest_gbps: float
) -> "Speeds":
    """Convert the options' units to those of weightsync.plans.cost: seconds, bytes per second."""
    from weightsync.plans.cost import GIGABIT, Speeds

    return Speeds(
        trainer_link=trainer_gbps * GIGABIT,
        rollout_link=rollout_gbps * GIGABIT,
        latency_s=latency_us * 1e-6,
        rpc_s=rpc_ms * 1e-3,
        copy=copy_gbps * GIGABIT,
        digest=digest_gbps * GIGABIT,
    )
