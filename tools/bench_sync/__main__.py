"""`make bench-sync`: measures every method on every shape and case, interleaved, and writes benchmarks/sync.*.

`--only` measures some cases and keeps the others of the last run: sync.json says of each case in which run, of which
commit and at which load it was measured.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from servicekit.versions import software_versions
from tools.bench_sync.cases import measure, merged
from tools.bench_sync.methods.registry import BUSY, METHODS
from tools.bench_sync.report.definitions import DEFINITIONS
from tools.bench_sync.report.page import write
from tools.bench_sync.shapes import CASES, DEFAULT_SHAPES, SHAPES, config_of, write_model
from tools.conditions import commit, cpu, now

HEADLINE = "TP2 -> TP2"
BUCKET_MIB = 32.0


async def run(arguments: argparse.Namespace) -> None:
    """Measure all cases that the options select, smallest first; write the files after each."""
    wanted = [(shape, case) for shape in arguments.shapes for case in CASES]
    wanted = [(shape, case) for shape, case in wanted if _is_selected(f"{shape}, {case.name}", arguments.only)]
    cases = merged(_earlier(arguments), [f"{shape}, {case.name}" for shape, case in wanted])
    conditions = {"run": now(), "commit": commit(), "bucket_mib": arguments.bucket_mib}
    with tempfile.TemporaryDirectory(prefix="bench-models-") as folder:
        for shape, case in wanted:
            name = f"{shape}, {case.name}"
            print(f"{name} ...", file=sys.stderr, flush=True)
            model = Path(folder) / shape
            write_model(shape, model)
            # Two busy engines on two cores leave none for the round: busy ones are measured at the headline only.
            methods = [method for method in arguments.methods if method not in BUSY or case.name == HEADLINE]
            found = await measure(case, model, arguments.repetitions, arguments.bucket_mib, methods)
            cases[name] = {"measured": now(), **conditions, **found}
            print(f"  {found['seconds']} s, {found['ratios']}", file=sys.stderr, flush=True)
            write(summarize(cases), arguments.out)


def summarize(cases: dict[str, Any]) -> dict[str, Any]:
    """Make the content of sync.json; its headline is the largest model at HEADLINE, else the last case."""
    order = [f"{shape}, {case.name}" for shape in SHAPES for case in CASES]
    cases = dict(sorted(cases.items(), key=lambda item: order.index(item[0])))
    named = [name for name in cases if name.endswith(HEADLINE)]
    headline = max(named, key=lambda name: cases[name]["parameters"]) if named else list(cases)[-1]
    return {
        "created": now(),
        "host": {"cpu": cpu(), "cores": os.cpu_count()},
        "software": software_versions(("torch", "sglang")),
        "runs": sorted({case["run"] for case in cases.values()}),
        "dtype": "bfloat16",
        "shapes": {shape: config_of(shape) for shape in SHAPES if any(n.startswith(f"{shape},") for n in cases)},
        "definitions": DEFINITIONS,
        "cases": cases,
        "headline": headline,
        "ratios": cases[headline]["ratios"],
    }


def _is_selected(name: str, only: list[str]) -> bool:
    return not only or any(part in name for part in only)


def _earlier(arguments: argparse.Namespace) -> dict[str, Any]:
    path = arguments.out / "sync.json"
    if not arguments.only or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Run the benchmark. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(DEFAULT_SHAPES))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help='cases by a part of their name, "tiny"')
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_MIB)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    asyncio.run(run(arguments))
    print((arguments.out / "sync.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
