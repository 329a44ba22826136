"""`python -m tools.measured_rounds [--json FILE]` prints the table of docs/weight-sync.md (minutes, both cores)."""

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch

from tools.gpu_check.fleet import redis_url
from tools.measured_rounds.compare import Case, RoundComparison, UnsteadyMachine, compare
from weightsync.layouts.layout import Parallel

CASES = tuple(
    Case(hidden=hidden, trainer=trainer, rollout=rollout, replicas=replicas)
    for hidden in (256, 512, 1024)
    for trainer, rollout, replicas in (
        (Parallel(tensor=2), Parallel(), 1),
        (Parallel(tensor=2), Parallel(), 2),
        (Parallel(tensor=2), Parallel(), 4),
        (Parallel(tensor=2), Parallel(tensor=2), 1),
    )
)


def main() -> None:
    """Print the comparison of every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    rows = []
    with redis_url() as url:
        for case in CASES:
            try:
                rows.append(compare(case, url, arguments.rounds))
            except UnsteadyMachine as error:
                print(f"{case}: not measured: {error}", flush=True)
            else:
                print(_row(rows[-1]), flush=True)
    if arguments.json is not None:
        text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        arguments.json.write_text(text, encoding="utf-8")


def _row(row: RoundComparison) -> str:
    case, ms = row.case, 1000.0
    who = f"{case.trainer.tensor} -> {case.replicas} x {case.rollout.tensor}"
    phases = " | ".join(
        f"{row.measured[name] * ms:.1f} / {row.simulated[name] * ms:.1f}" for name in ("transfer", "verify", "total")
    )
    return f"| {row.shard_bytes / 2**20:.0f} | {who} | {phases} | {row.ratio:.2f} |"


if __name__ == "__main__":
    main()
