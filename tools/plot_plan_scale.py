"""Measures how planning scales, simulates rounds up to 4,096 rollout ranks, and plots both for docs/weight-sync.md.

python -m tools.plot_plan_scale measure     benchmarks/plan/scale.json (minutes)
python -m tools.plot_plan_scale simulate    benchmarks/plan/simulated.json (minutes)
python -m tools.plot_plan_scale plot        docs/images/plan-scale.png and docs/images/simulated-rounds.png
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path("benchmarks/plan")
IMAGES = Path("docs/images")

# Parallel sizes of the trainer with 64 to 4,096 ranks; rollouts of 8 ranks, as many as trainer ranks.
_SCALED = [
    (model, f"{sizes},dp={data}", "tp=8")
    for model, sizes, datas in (
        ("qwen3-32b", "tp=8,pp=4", (2, 8, 32, 128)),
        ("qwen3-30b-a3b", "tp=4,pp=4,ep=16", (4, 16, 64, 256)),
        ("qwen3-235b-a22b", "tp=4,pp=8,ep=8", (2, 8, 32, 128)),
        ("deepseek-v3-sized", "tp=4,pp=16,ep=4", (1, 4, 16, 64)),
    )
    for data in datas
]
_SIMULATED = ("qwen3-32b", "tp=8,pp=4,dp=2", "tp=8")
_REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Options, and the largest number of replicas.
_CASES: dict[str, tuple[list[str], int]] = {
    "messages of 256 MiB": (["--bucket-mib", "256"], 512),
    "messages of 16 MiB": (["--bucket-mib", "16"], 512),
    "16 MiB, replica 0 four times slower": (["--bucket-mib", "16", "--fault", "slow:0=4"], 64),
}


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("measure", "simulate", "plot"))
    {"measure": measure, "simulate": simulate, "plot": plot}[parser.parse_args().step]()


def measure() -> None:
    """Plan every size, one after the other, each in a process of its own."""
    rows = []
    for model, trainer, rollout in _SCALED:
        command = ["tandem", "plan", "--json", "--model", model, "--trainer", trainer, "--rollout", rollout]
        figures = _run(command)
        tensors = _tensors(model)
        rows.append({"command": " ".join(command), "tensors": tensors, **_some(figures)})
        print(rows[-1], flush=True)
    _write("scale.json", rows)


def simulate() -> None:
    """Simulate a round per number of replicas, without and with a slow replica."""
    model, trainer, rollout = _SIMULATED
    rows = []
    for name, (options, most) in _CASES.items():
        for replicas in (count for count in _REPLICAS if count <= most):
            sizes = ["--model", model, "--trainer", trainer, "--rollout", rollout, "--replicas", str(replicas)]
            command = ["tandem", "plan", "--json", "--simulate", *sizes, *options]
            figures = _run(command)
            simulated = figures["simulated"]
            rows.append(
                {
                    "command": " ".join(command),
                    "case": name,
                    "rollout_ranks": figures["rollout_ranks"],
                    "seconds": simulated["seconds"],
                    "predicted_seconds": figures["predicted_seconds"],
                    "trainer_egress_bytes": simulated["trainer_egress_bytes"],
                    "events": simulated["events"],
                }
            )
            print(rows[-1], flush=True)
    _write("simulated.json", rows)


def plot() -> None:
    """Plot the measured and the simulated figures."""
    import matplotlib

    matplotlib.use("Agg")
    IMAGES.mkdir(parents=True, exist_ok=True)
    _plot_scale(json.loads((DATA / "scale.json").read_text(encoding="utf-8")))
    _plot_simulated(json.loads((DATA / "simulated.json").read_text(encoding="utf-8")))


def _plot_scale(rows: list[dict[str, Any]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for model, points in _by(rows, "model"):
        work = [row["trainer_ranks"] * row["tensors"] for row in points]
        axes.loglog(work, [row["plan_cpu_seconds"] for row in points], "o-", label=model, markersize=4)
    ends = [min(r["trainer_ranks"] * r["tensors"] for r in rows), max(r["trainer_ranks"] * r["tensors"] for r in rows)]
    least = min(row["plan_cpu_seconds"] for row in rows)
    axes.loglog(ends, [least, least * ends[1] / ends[0]], "k:", linewidth=1, label="linear")
    axes.set(xlabel="trainer ranks x tensors", ylabel="core seconds to plan", title="tandem plan")
    _save(figure, axes, "plan-scale.png")


def _plot_simulated(rows: list[dict[str, Any]]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for case, points in _by(rows, "case"):
        ranks = [row["rollout_ranks"] for row in points]
        axes.semilogx(ranks, [row["seconds"]["total"] for row in points], "o-", label=case, markersize=4)
        if case.startswith("messages"):
            axes.semilogx(ranks, [row["predicted_seconds"] for row in points], "k:", linewidth=1)
    axes.set(
        xlabel="rollout ranks (replicas of 8)",
        ylabel="seconds of a round, simulated",
        title=f"{_SIMULATED[0]} (dotted: closed form) from 64 trainer ranks, 400 Gbit/s per rank",
        ylim=(0, None),
    )
    _save(figure, axes, "simulated-rounds.png")


def _save(figure: Any, axes: Any, name: str) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(IMAGES / name, dpi=120)


def _by(rows: list[dict[str, Any]], key: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for value in dict.fromkeys(row[key] for row in rows):
        yield value, [row for row in rows if row[key] == value]


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *command[1:]], check=True, capture_output=True, timeout=1200
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _some(figures: dict[str, Any]) -> dict[str, Any]:
    names = (
        "model",
        "trainer_ranks",
        "plan_seconds",
        "plan_cpu_seconds",
        "peak_rss_bytes",
        "messages",
        "redundancy",
        "sender_imbalance",
    )
    return {name: figures[name] for name in names}


def _tensors(model: str) -> int:
    from weightsync.layouts.hf import hf_layout
    from weightsync.model.spec import preset

    return len(hf_layout(preset(model)).tensors)


def _write(name: str, rows: list[dict[str, Any]]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / name).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
