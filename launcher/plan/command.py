"""`tandem plan`: checks the options, plans a weight sync and prints its figures. Needs no GPU."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.plan.figures import DTYPE_BYTES, PlannedSync, PlanRequest
from launcher.plan.limits import check_effort, check_numbers, check_simulation
from launcher.plan.model import model_spec
from launcher.plan.simulated import simulated, simulation_table
from launcher.plan.sizes import rollout_sizes, trainer_sizes
from launcher.report import make_console, reporting
from servicekit.lifecycle.exit_codes import EXIT_OK
from weightsync.plans.cost import Speeds
from weightsync.plans.limits import bucket_bytes, largest_message


@reporting()
def plan_command(
    *,
    model: str,
    trainer: str,
    rollout: str,
    replicas: int,
    dtype: str,
    bucket_mib: float | None,
    speeds: Speeds,
    as_json: bool,
    simulate: bool,
    faults: Sequence[str],
) -> int:
    """Plan a weight sync and print its figures.

    Args:
        trainer: parallel sizes as text, e.g. "tp=8,pp=2"; so is rollout.
    Returns: the exit code.
    """
    check_numbers(bucket_mib, speeds)
    spec = model_spec(model)
    trainer_parallel, notes = trainer_sizes(trainer, spec)
    request = PlanRequest(
        model=model,
        spec=spec,
        trainer=trainer_parallel,
        rollout=rollout_sizes(rollout),
        replicas=replicas,
        dtype=dtype,
        bucket_bytes=largest_message(bucket_bytes(bucket_mib), "cuda", replicas),
        speeds=speeds,
        notes=notes,
    )
    bucket_text = f"{request.bucket_bytes / 2**20:g}" if bucket_mib is None else f"{bucket_mib:g}"
    check_effort(
        spec,
        trainer_parallel,
        request.rollout,
        message_bytes=request.bucket_bytes,
        dtype_bytes=DTYPE_BYTES[dtype],
        values={"--model": model, "--trainer": trainer, "--rollout": rollout, "--bucket-mib": bucket_text},
    )
    planned = PlannedSync.of(request)
    figures = planned.as_json()
    if simulate or faults:
        check_simulation(len(planned.messages), replicas)
        figures["simulated"] = simulated(planned, faults)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print_table(make_console(), planned, figures)
    return EXIT_OK


def _print_table(console: Console, planned: PlannedSync, figures: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _rows(planned, figures):
        table.add_row(Text(name, style="bold"), Text(text))
    console.print(table)
    for note in figures["notes"]:
        console.print(Text(f"chosen: {note}", style="dim"))
    if "simulated" in figures:
        console.print(simulation_table(figures["simulated"]))


def _rows(planned: PlannedSync, figures: dict[str, Any]) -> list[tuple[str, str]]:
    request = planned.request
    replica_ranks = request.rollout.world_size
    return [
        ("model", f"{figures['model']}: {_size(figures['total_bytes'])} in {figures['dtype']}"),
        ("trainer", f"{figures['trainer_ranks']} ranks"),
        ("rollouts", f"{figures['rollout_ranks']} ranks: {request.replicas} replicas of {replica_ranks}"),
        ("redundancy", f"{figures['redundancy']:.2f} (bytes received / bytes of the shards)"),
        ("busiest sender", f"{_size(figures['max_sender_bytes'])}, {figures['sender_imbalance']:.3f} of the mean"),
        ("busiest receiver", _size(figures["max_receiver_bytes"])),
        ("trainer egress", f"{_size(figures['trainer_egress_bytes'])} for each rollout layout, whatever its replicas"),
        ("messages", f"{figures['messages']} of at most {_size(request.bucket_bytes)} to each replica"),
        ("staging", f"{_size(figures['staging_bytes_per_rank'])} per rank"),
        ("predicted", f"{figures['predicted_seconds']:.3f} s, bound by {figures['bound_by']}"),
        ("", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in figures["predicted_terms_s"].items())),
        ("planned in", f"{figures['plan_seconds']:.2f} s, {_size(figures['peak_rss_bytes'])} peak memory"),
    ]


def _size(num_bytes: int) -> str:
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.4g} {units[0]}"
