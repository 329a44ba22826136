"""`python -m tools.gpu_check`: see the package."""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tools.gpu_check
from tools.gpu_check.cases import MULTI_RANK, MULTI_RANK_NCCL, cases
from tools.gpu_check.environment import environment
from tools.gpu_check.fleet import redis_url, run_case

OUT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu"
NOTHING_RAN = 2


def main() -> int:
    """Runs the cases. Returns: 1 if a case was not exact or failed, 2 if nothing ran."""
    parser = argparse.ArgumentParser(
        description=tools.gpu_check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds per case, after one that is not")
    parser.add_argument("--layers", type=int, default=24, help="layers of the random model (24: 0.6 B parameters)")
    parser.add_argument("--hidden", type=int, default=1024, help="its width")
    parser.add_argument("--allow-skip", action="store_true", help="where nothing can run, exit 0 all the same")
    options = parser.parse_args()
    nothing_ran = 0 if options.allow_skip else NOTHING_RAN
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: skipped everything: torch is not installed")
        return nothing_ran
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: skipped everything: torch finds no CUDA device here")
        print("  not run: collective over NCCL, colocated over CUDA IPC, device copies")
        return nothing_ran
    nccl = tuple(torch.cuda.nccl.version())
    multi_rank = nccl >= MULTI_RANK_NCCL and os.environ.get(MULTI_RANK) == "1"
    chosen, skipped = cases(torch.cuda.device_count(), nccl, multi_rank=multi_rank)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "num_gpus": torch.cuda.device_count(),
        "environment": environment(),
        "copy_gb_per_s": copy_speeds(torch.cuda.device_count()),
        "cases": [],
        "skipped": skipped,
    }
    with redis_url() as url:
        for case in chosen:
            result = run_case(case, url, layers=options.layers, hidden=options.hidden, rounds=options.rounds)
            report["cases"].append(with_copy_share(result, report["copy_gb_per_s"]))
            print(f"gpu-check: {case.name}: {result.get('error') or summary(report['cases'][-1])}", flush=True)
    for line in skipped:
        print(f"gpu-check: skipped {line}")
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{report['device'].replace(' ', '-').lower()}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"gpu-check: written to {path}")
    return 0 if all(result["exact"] for result in report["cases"]) else 1


def with_copy_share(result: dict[str, Any], copy_gb_per_s: dict[str, float]) -> dict[str, Any]:
    """The result with its speed over that of the device's own copy, between GPUs if it used several."""
    if "gb_per_s" not in result:
        return result
    copy = copy_gb_per_s["between_devices" if result["gpus"] > 1 else "same_device"]
    return {**result, "share_of_copy": result["gb_per_s"] / copy}


def summary(result: dict[str, Any]) -> str:
    """One line of a case's result."""
    exact = "exact" if result["exact"] else f"NOT EXACT: {result['wrong'][:3]}"
    speed = f"{result['gb_per_s']:.1f} GB/s, {result['share_of_copy']:.2f} of the device's copy"
    return f"{exact}, {speed}, round {result['seconds']['total'] * 1000:.1f} ms"


def copy_speeds(num_gpus: int) -> dict[str, float]:
    """GB/s of a 1 GiB copy on a device, and between two."""
    import torch

    def speed(source: torch.Tensor, target: torch.Tensor) -> float:
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize(source.device)
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(source.device)
            torch.cuda.synchronize(target.device)
            seconds.append(time.perf_counter() - start)
        return float(source.numel() / statistics.median(seconds[1:]) / 1e9)

    here = torch.zeros(2**30, dtype=torch.uint8, device="cuda:0")
    speeds = {"same_device": speed(here, torch.empty_like(here))}
    if num_gpus > 1:
        speeds["between_devices"] = speed(here, torch.empty_like(here, device="cuda:1"))
    return speeds


if __name__ == "__main__":
    sys.exit(main())
