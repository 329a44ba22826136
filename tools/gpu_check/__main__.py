"""`python -m tools.gpu_check`: see the package's docstring."""

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tools.gpu_check
from servicekit.cuda import compilers_here, find_gpus
from servicekit.logs import configure_logging
from tools.gpu_check.cases import MULTI_RANK, MULTI_RANK_NCCL, cases
from tools.gpu_check.environment import environment
from tools.gpu_check.fleet import redis_url, run_case
from tools.gpu_check.services.findings import Findings

OUT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "gpu"
NOTHING_RAN = 2
PARTS = ("attention", "services", "speed")
# What a process cannot do for others.
CONTAINERS = (
    "containers: run `docker compose --profile gpu up` with NCCL_DEBUG: INFO in docker-compose.yml's environment; "
    "NCCL must say `via P2P` between them"
)
# Dry run: as many GPUs as any case needs, and a small model.
DRY_GPUS, DRY_LAYERS, DRY_HIDDEN = 4, 2, 64


def main() -> int:
    """Run the check. Returns: 0; 1 if a check failed or a case was not exact, 2 if nothing ran."""
    options = parse()
    nothing_ran = 0 if options.allow_skip else NOTHING_RAN
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: skipped everything: torch is not installed")
        return nothing_ran
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        why = find_gpus().why_not
        print(f"gpu-check: skipped everything: torch finds no CUDA device here{why and f': {why}'}")
        print(
            "  not run: attention's kernel, real services, collective over NCCL, colocated over CUDA IPC, device copies"
        )
        return nothing_ran
    configure_logging("gpu-check", level="ERROR")
    report: dict[str, Any] = {
        "device": device_name(options.device),
        "environment": environment(),
        "skipped": [CONTAINERS],
    }
    try:
        check_parts(options, report)
    finally:  # what was found before an interruption is found
        for line in report["skipped"]:
            print(f"gpu-check: skipped {line}")
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{report['device'].replace(' ', '-').lower()}.json"
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"gpu-check: written to {path}")
    return verdict(report, nothing_ran)


def check_parts(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run the chosen parts; what is found goes into the report immediately."""
    if "attention" in options.parts:
        from tools.gpu_check.attention import check_attention

        report["attention"] = []
        check_attention(options.device, Findings(report["attention"]))
    if "services" in options.parts:
        report["services"] = []
        check_services(options, report["skipped"], Findings(report["services"]))
    if "speed" in options.parts:
        report["cases"] = []
        check_speed(options, report)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=tools.gpu_check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--fleets", nargs="+", help="of the services, those whose names begin so: dense deaths trainer")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds per case, after one that is not")
    parser.add_argument("--layers", type=int, help="layers of the random model (default 24: 0.6 B parameters)")
    parser.add_argument("--hidden", type=int, help="hidden size of the random model (default 1024)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of <device>.json")
    parser.add_argument("--allow-skip", action="store_true", help="exit 0 even if nothing can run")
    options = parser.parse_args()
    dry = options.device == "cpu"
    options.layers = options.layers or (DRY_LAYERS if dry else 24)
    options.hidden = options.hidden or (DRY_HIDDEN if dry else 1024)
    return options


def verdict(report: dict[str, Any], nothing_ran: int) -> int:
    """Return the exit code: 1 if a check or case failed; `nothing_ran` if none ran."""
    passed = [check["passed"] for part in ("attention", "services") for check in report.get(part, [])]
    passed += [case["exact"] for case in report.get("cases", [])]
    return nothing_ran if not passed else int(not all(passed))


def device_name(device: str) -> str:
    """Return the name of the first GPU, or "cpu"."""
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def gpus_of(device: str) -> tuple[list[str], tuple[int, ...], bool]:
    """Return GPU ids, NCCL's version, and whether ranks may share a GPU; a dry run has four imaginary GPUs."""
    import torch

    from weightsync.transfer.facts import nccl_version

    if device == "cpu":
        return [str(index) for index in range(DRY_GPUS)], (0,), False
    nccl = nccl_version()
    gpus = list(find_gpus().usable) or [str(index) for index in range(torch.cuda.device_count())]
    return gpus, nccl, nccl >= MULTI_RANK_NCCL and os.environ.get(MULTI_RANK) == "1"


def check_services(options: argparse.Namespace, skipped: list[str], findings: Findings) -> None:
    """Check real services. skipped: gets a line per check that cannot run."""
    from tools.gpu_check.services.run import choose, run_fleets
    from tools.gpu_check.services.settings import SCALES

    device = options.device
    if device == "cuda":
        missing = [f"{name} not found" for name in compilers_here().missing]
        findings.add("environment", [*filter(None, [find_gpus().why_not]), *missing])
        if findings.failed:
            return
    gpus, _, multi_rank = gpus_of(device)
    chosen, why_not = choose(gpus, multi_rank=multi_rank)
    skipped += why_not
    if options.fleets:
        chosen = {what: shape for what, shape in chosen.items() if what.startswith(tuple(options.fleets))}
        skipped.append(f"services but {', '.join(chosen) or 'none'}: --fleets {' '.join(options.fleets)}")
    asyncio.run(run_fleets(chosen, SCALES[device], findings))


def check_speed(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Move random tensors over every transport; `report` gets speeds of the device's copies, and the cases."""
    gpus, nccl, multi_rank = gpus_of(options.device)
    chosen, why_not = cases(len(gpus), nccl, multi_rank=multi_rank, device=options.device)
    report["skipped"] += why_not
    if options.device == "cpu":  # each way once: sizes change speeds, which a dry run does not measure
        chosen = list({(case.transport, case.install, case.experts): case for case in chosen}.values())
    copies = copy_speeds(options.device, len(gpus))
    report |= {"num_gpus": len(gpus), "copy_gb_per_s": copies}
    with redis_url() as url:
        for case in chosen:
            result = run_case(case, url, layers=options.layers, hidden=options.hidden, rounds=options.rounds)
            report["cases"].append(with_copy_share(result, copies))
            print(f"gpu-check: {case.name}: {result.get('error') or summary(report['cases'][-1])}", flush=True)


def with_copy_share(result: dict[str, Any], copy_gb_per_s: dict[str, float]) -> dict[str, Any]:
    """Add to a result its speed as a share of the device's own copy, that between GPUs if it used several."""
    if "gb_per_s" not in result:
        return result
    copy = copy_gb_per_s["between_devices" if result["gpus"] > 1 else "same_device"]
    return {**result, "share_of_copy": result["gb_per_s"] / copy}


def summary(result: dict[str, Any]) -> str:
    """Format a case's result as one line."""
    exact = "exact" if result["exact"] else f"NOT EXACT: {result['wrong'][:3]}"
    speed = f"{result['gb_per_s']:.1f} GB/s, {result['share_of_copy']:.2f} of the device's copy"
    segments = f"{result['segments_per_s']:.0f} segments/s"
    return f"{exact}, {speed}, {segments}, round {result['seconds']['total'] * 1000:.1f} ms"


def copy_speeds(device: str, num_gpus: int) -> dict[str, float]:
    """Measure copies of 1 GiB (dry run: 64 MiB) on a device, and between two, in GB/s."""
    import torch

    from weightsync.transfer.devices import wait_for_device

    def speed(source: torch.Tensor, target: torch.Tensor) -> float:
        seconds = []
        for _ in range(6):
            wait_for_device(source.device)
            start = time.perf_counter()
            target.copy_(source)
            wait_for_device(source.device)
            wait_for_device(target.device)
            seconds.append(time.perf_counter() - start)
        return float(source.numel() / statistics.median(seconds[1:]) / 1e9)

    first, second = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1")
    here = torch.zeros(2**26 if device == "cpu" else 2**30, dtype=torch.uint8, device=first)
    speeds = {"same_device": speed(here, torch.empty_like(here))}
    if num_gpus > 1:
        speeds["between_devices"] = speed(here, torch.empty_like(here, device=second))
    return speeds


if __name__ == "__main__":
    sys.exit(main())
