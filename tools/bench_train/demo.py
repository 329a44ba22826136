"""`make bench-demo`: whole iterations of the demo, ours at several layouts and TRL's in turns; benchmarks/demo.*.

An iteration is generation, rewards, four optimizer updates and, in ours, the weights' way to the engines. Evaluations
and checkpoints are left out of both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from servicekit.versions import software_versions
from tandem_files.metrics_file import MetricsFile
from tools.conditions import commit, cpu, now

CONFIG = Path("examples/arithmetic/arithmetic.yaml")
TRL_PYTHON = Path(".cache/bench-train-venv/bin/python")
DEADLINE_S = 600
# "default" is the demo as it is: TP2 and two replicas, and prompts that are computed once for several samples.
WAYS: Mapping[str, Sequence[str]] = {
    "default": (),
    "prompts not shared": ("trainer.share_prompts=false",),
    "dp2": ("trainer.tensor_parallel=1", "trainer.data_parallel=2"),
    "dp2, whole prompts": (
        "trainer.tensor_parallel=1",
        "trainer.data_parallel=2",
        "grpo.updates_divide=prompts",
    ),
    "tp1": ("trainer.tensor_parallel=1",),
    "tp1, 1 replica": ("trainer.tensor_parallel=1", "rollout.replicas=1"),
}
PARTS = ("generate_s", "train_s", "sync_s", "overhead_s")
# The first have engines that are not warm yet.
WARM_UP = 2


def ours(settings: Sequence[str], iterations: int, folder: Path) -> dict[str, list[float]]:
    """Run the demo. Returns: seconds of each iteration and of its parts."""
    fixed = (
        f"run.iterations={iterations}",
        f"run.output_dir={folder}",
        "run.evaluate_every=1000",
        "run.checkpoint_every=1000",
        "trainer.learning_rate_decay=constant",
    )
    command = [".venv/bin/tandem", "run", "-c", str(CONFIG)]
    for setting in (*fixed, *settings):
        command += ["--set", setting]
    _run(command)
    (file,) = folder.glob("*/metrics.jsonl")
    rows: list[dict[str, Any]] = MetricsFile(file).rows()[WARM_UP:]
    whole = [row["iteration_s"] - row["evaluate_s"] - row["checkpoint_s"] - row["export_s"] for row in rows]
    return {"iteration_s": whole} | {part: [row[part] for row in rows] for part in PARTS}


def trl(iterations: int, threads: int, folder: Path) -> dict[str, list[float]]:
    """Run TRL on the demo's work. Returns: seconds of each iteration."""
    command = [str(TRL_PYTHON.absolute()), "-m", "tools.bench_train.workers.trl_demo", str(CONFIG), str(folder)]
    said = _run([*command, "--iterations", str(iterations), "--threads", str(threads)])
    return {"iteration_s": json.loads(said.splitlines()[-1])[WARM_UP:]}


def _run(command: Sequence[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if found.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {found.returncode}:\n{found.stdout[-2000:]}{found.stderr[-4000:]}")
    return found.stdout


def summarise(runs: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> dict[str, Any]:
    """Return medians by way: of its runs' medians, and of the ratios to the TRL run of the same turn."""
    middle = {way: [{name: median(values) for name, values in run.items()} for run in of] for way, of in runs.items()}
    out: dict[str, Any] = {
        way: {name: round(median(run[name] for run in of), 4) for name in of[0]} for way, of in middle.items()
    }
    for way, of in middle.items():
        ratios = [theirs["iteration_s"] / run["iteration_s"] for theirs, run in zip(middle["trl"], of, strict=True)]
        out[way]["vs_trl"] = round(median(ratios), 3)
        out[way]["vs_trl_of_each_turn"] = [round(ratio, 3) for ratio in ratios]
        if "overhead_s" in of[0]:
            out[way]["added"] = round(median(run["overhead_s"] / run["iteration_s"] for run in of), 4)
    return out


def page(results: Mapping[str, Any]) -> str:
    """Make demo.md."""
    host = results["host"]
    lines = [
        "# The demo's iteration against TRL's",
        "",
        f"`make bench-demo`, {results['run']}, commit {results['commit'] or 'unknown'}; {host['cores']} cores of "
        f"{host['cpu']}; {results['turns']} turns of {results['iterations']} iterations each, the first {WARM_UP} left "
        f"out. Medians; load average before: {results['load_average_before'][0]:.1f}.",
        "",
        "64 prompts x 16 completions of at most 4 tokens, 4 updates, float32; without evaluations and checkpoints. "
        "`added` is what is neither engine nor trainer, of an iteration.",
        "",
        "| way | iteration, s | times as fast as TRL | generate | train | sync | added |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, found in results["ways"].items():
        parts = [f"{found[name]:.3f}" if name in found else "-" for name in ("generate_s", "train_s", "sync_s")]
        added = f"{found['added']:.1%}" if "added" in found else "-"
        lines.append(f"| {way} | {found['iteration_s']:.3f} | {found['vs_trl']:.2f} | {' | '.join(parts)} | {added} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmark. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    threads = os.cpu_count() or 1
    runs: dict[str, list[dict[str, list[float]]]] = {way: [] for way in ("trl", *arguments.ways)}
    load = os.getloadavg()
    for turn in range(arguments.turns):
        for way, of_way in runs.items():
            with tempfile.TemporaryDirectory(prefix="bench-demo-") as folder:
                if way == "trl":
                    of_way.append(trl(arguments.iterations, threads, Path(folder)))
                else:
                    of_way.append(ours(WAYS[way], arguments.iterations, Path(folder)))
            print(f"turn {turn}, {way}: {median(of_way[-1]['iteration_s']):.3f} s", file=sys.stderr, flush=True)
    results = {
        "run": now(),
        "commit": commit(),
        "host": {"cpu": cpu(), "cores": os.cpu_count()},
        "software": software_versions(("torch", "transformers", "megatron-core", "sglang")),
        "turns": arguments.turns,
        "iterations": arguments.iterations,
        "load_average_before": list(load),
        "ways": summarise(runs),
        "samples": runs,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "demo.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "demo.md").write_text(page(results), encoding="utf-8")
    print(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
