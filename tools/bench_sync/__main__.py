"""`make bench-sync`: measures every method on every shape and case, interleaved, and writes benchmarks/sync.*."""

import argparse
import asyncio
import datetime
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from servicekit.versions import software_versions
from tools.bench_sync.figures import DEFINITIONS, Samples, medians, paired_ratios, write
from tools.bench_sync.methods import METHODS, SETTLED, WRITING, Seconds, Session, session
from tools.bench_sync.rig import running
from tools.bench_sync.shapes import CASES, SHAPES, Case, config_of, write_model
from weightsync.hf_layout import hf_layout
from weightsync.model_spec import ModelSpec

HEADLINE = "TP2 -> TP2"
BUCKET_MIB = 32.0
LAG_S = 10.0  # SGLang answers an update of its own when its first rank has it; the others follow


async def check(opened: Session, method: str, expected: list[dict[str, str]] | None) -> list[dict[str, str]]:
    """Runs a method over poisoned engines. Raises: RuntimeError: it leaves other weights than the first one did."""
    await opened.poison()
    await METHODS[method](opened)
    found = await opened.checksums()
    deadline_s = time.monotonic() + LAG_S
    while expected is not None and found != expected and time.monotonic() < deadline_s:
        found = await opened.checksums()
    if expected is not None and found != expected:
        names = [name for a, b in zip(found, expected, strict=True) for name in a if a[name] != b[name]]
        raise RuntimeError(f"{method} leaves other weights than ours: {', '.join(names[:5])}")
    return found


async def measure(case: Case, model: Path, repetitions: int, bucket_mib: float) -> Samples:
    """Every method `repetitions` times, in turns, after one checked run of each."""
    samples: dict[str, list[Seconds]] = {method: [] for method in METHODS}
    async with running(model, case, int(bucket_mib * 2**20)) as rig, session(rig) as opened:
        try:
            expected = None
            for method in WRITING:
                expected = await check(opened, method, expected)
            for _ in range(repetitions):
                for method, update in METHODS.items():
                    if method in SETTLED:
                        await update(opened)
                    samples[method].append(await update(opened))
        except Exception as error:
            raise RuntimeError(f"{case.name}: {error}\n{rig.post_mortem()}") from error
    return samples


def describe_case(samples: Samples, spec: ModelSpec) -> dict[str, Any]:
    """A case's entry in sync.json."""
    layout = hf_layout(spec)
    parameters = sum(layout.elements_of(rank) for rank in range(layout.num_ranks))
    return {
        "parameters": parameters,
        "bytes": 2 * parameters,
        "load_average": list(os.getloadavg()),
        "medians_s": medians(samples),
        "ratios": paired_ratios(samples),
        "samples_s": {method: [each["total"] for each in runs] for method, runs in samples.items()},
    }


async def run(arguments: argparse.Namespace) -> None:
    """All shapes and cases, smallest first; the files are written anew after each case."""
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-models-") as folder:
        for shape in arguments.shapes:
            spec = write_model(shape, Path(folder) / shape)
            for case in CASES:
                name = f"{shape}, {case.name}"
                print(f"{name} ...", file=sys.stderr, flush=True)
                samples = await measure(case, Path(folder) / shape, arguments.repetitions, arguments.bucket_mib)
                cases[name] = describe_case(samples, spec)
                print(f"  {cases[name]['ratios']}", file=sys.stderr, flush=True)
                write(summarize(cases, arguments), arguments.out)


def summarize(cases: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What sync.json holds. Its headline is the largest model at HEADLINE, or the last case before there is one."""
    named = [name for name in cases if name.endswith(HEADLINE)]
    headline = max(named, key=lambda name: cases[name]["parameters"]) if named else list(cases)[-1]
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": {"cpu": _cpu(), "cores": os.cpu_count(), "load_average": list(os.getloadavg())},
        "software": software_versions(("torch", "sglang")),
        "repetitions": arguments.repetitions,
        "bucket_mib": arguments.bucket_mib,
        "dtype": "bfloat16",
        "shapes": {shape: config_of(shape) for shape in arguments.shapes},
        "definitions": DEFINITIONS,
        "cases": cases,
        "headline": headline,
        "ratios": cases[headline]["ratios"],
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    """Runs the benchmark. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_MIB)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    asyncio.run(run(arguments))
    print((arguments.out / "sync.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
