"""`make bench-train`: measures a train step in every way, interleaved, and writes benchmarks/train.*.

A run of some `--shapes`, `--lengths` or `--ways` writes only these: give it another `--out`, or `--merge`, which keeps
the other cases of the file; each case says which run it is of.
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
from tools.bench_train.cases import measure
from tools.bench_train.report.definitions import DEFINITIONS
from tools.bench_train.report.figures import headline
from tools.bench_train.report.page import write
from tools.bench_train.shapes import DEFAULT_SHAPES, LENGTHS, SHAPES, write_model
from tools.bench_train.workers.handle import WAYS
from tools.conditions import commit, cpu, now

TRL_PYTHON = Path(".cache/bench-train-venv/bin/python")


async def run(arguments: argparse.Namespace) -> None:
    """Measure all models, smallest first; write the files after each."""
    results: dict[str, Any] = {
        "run": now(),
        "commit": commit(),
        "host": {"cpu": cpu(), "cores": os.cpu_count()},
        "threads": arguments.threads,
        "software": software_versions(("torch", "transformers", "megatron-core")) | _trl(arguments),
        "shapes": {shape: SHAPES[shape].config() for shape in arguments.shapes},
        "definitions": DEFINITIONS,
        "cases": {},
        "ratios": {},
    }
    if arguments.merge:
        old = json.loads((arguments.out / "train.json").read_text(encoding="utf-8"))
        results |= {"shapes": old["shapes"] | results["shapes"], "cases": old["cases"]}
    with tempfile.TemporaryDirectory(prefix="bench-models-") as folder:
        for shape in arguments.shapes:
            print(f"{shape} ...", file=sys.stderr, flush=True)
            model = Path(folder) / shape
            await asyncio.to_thread(write_model, SHAPES[shape], model)
            found = await measure(
                shape,
                arguments.lengths,
                arguments.ways,
                model,
                repetitions=arguments.repetitions,
                threads=arguments.threads,
                trl=arguments.trl_python.absolute(),
            )
            results["cases"] |= {
                name: case | {"run": results["run"], "commit": results["commit"]} for name, case in found.items()
            }
            results["ratios"] = headline(results["cases"])
            for name, case in found.items():
                print(f"  {name}: {case['seconds']} s, {case['ratios']}", file=sys.stderr, flush=True)
            write(results, arguments.out)


def _trl(arguments: argparse.Namespace) -> dict[str, str]:
    """Return TRL's version, from the folder that pip names after it."""
    packages = list(arguments.trl_python.parents[1].glob("lib/python*/site-packages/trl-*.dist-info"))
    return {"trl": packages[0].name.removesuffix(".dist-info").removeprefix("trl-")} if packages else {}


def main() -> int:
    """Run the benchmark. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(DEFAULT_SHAPES))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each way; its ranks share them")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="interpreter of TRL's environment")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--merge", action="store_true", help="keep the other cases of the file")
    arguments = parser.parse_args()
    if "trl" in arguments.ways and not arguments.trl_python.exists():
        parser.error(
            f"{arguments.trl_python} does not exist: tools/bench_train/make_venv.sh makes it, or leave trl out"
        )
    asyncio.run(run(arguments))
    print((arguments.out / "train.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
