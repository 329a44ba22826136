"""From samples to figures: medians, paired ratios, a table and a plot. Pure but for the files that it writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench_sync.methods import Seconds

Samples = Mapping[str, Sequence[Seconds]]  # by method; one entry per repetition, in order

DEFINITIONS = {
    "total": "seconds from the first call to the last reply: trainer's shards -> engines that serve them",
    "stock_*": "seconds until SGLang's first rank has the weights: it answers then, before the others (kind to it)",
    "pause": "seconds of that in which the engines do not generate",
    "vs_stock_flattened": "stock_flattened total / ours_in_place total",
    "vs_stock_per_tensor": "stock_per_tensor total / ours_in_place total",
    "vs_disk": "stock_disk total / ours_in_place total",
    "vs_floor": "floor_gloo total / TRANSFER of ours_in_place (packing, digests and unpacking included)",
    "vs_floor_whole_round": "floor_gloo total / ours_in_place total",
    "colocated_vs_collective": "ours_in_place total / ours_colocated_in_place total",
    "colocated_vs_collective_transfer": "the same for TRANSFER alone",
    "staged_pause_share": "ours_staged pause / ours_in_place pause",
    "ratio": "median over the repetitions of the ratio within one repetition",
}
# name: (numerator, its part, denominator, its part)
_RATIOS = {
    "vs_stock_flattened": ("stock_flattened", "total", "ours_in_place", "total"),
    "vs_stock_per_tensor": ("stock_per_tensor", "total", "ours_in_place", "total"),
    "vs_disk": ("stock_disk", "total", "ours_in_place", "total"),
    "vs_floor": ("floor_gloo", "total", "ours_in_place", "transfer"),
    "vs_floor_whole_round": ("floor_gloo", "total", "ours_in_place", "total"),
    "colocated_vs_collective": ("ours_in_place", "total", "ours_colocated_in_place", "total"),
    "colocated_vs_collective_transfer": ("ours_in_place", "transfer", "ours_colocated_in_place", "transfer"),
    "staged_pause_share": ("ours_staged", "pause", "ours_in_place", "pause"),
}


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    """Median seconds by method and part."""
    return {
        method: {part: round(median(each[part] for each in runs), 6) for part in runs[0]}
        for method, runs in samples.items()
    }


def paired_ratios(samples: Samples) -> dict[str, float]:
    """Median over repetitions of each ratio whose methods were measured.

    >>> paired_ratios({"ours_in_place": [{"total": 1.0}, {"total": 2.0}], "stock_disk": [{"total": 4.0}] * 2})
    {'vs_disk': 3.0}
    """
    found = {}
    for name, (above, above_part, below, below_part) in _RATIOS.items():
        if above in samples and below in samples:
            pairs = zip(samples[above], samples[below], strict=True)
            found[name] = round(median(a[above_part] / b[below_part] for a, b in pairs), 3)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Markdown: a row per case and method."""
    lines = ["| case | method | total ms | pause ms | ours / this |", "|---|---|---|---|---|"]
    for name, case in results["cases"].items():
        ours = case["medians_s"]["ours_in_place"]["total"]
        for method, parts in case["medians_s"].items():
            pause = f"{parts['pause'] * 1e3:.1f}" if "pause" in parts else ""
            lines.append(f"| {name} | {method} | {parts['total'] * 1e3:.1f} | {pause} | {ours / parts['total']:.2f} |")
    return "\n".join(lines) + "\n"


def write(results: Mapping[str, Any], folder: Path) -> None:
    """sync.json, sync.md and sync.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sync.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    notes = f"{results['host']['cpu']}, {results['host']['cores']} cores; load average during the run "
    notes += ", ".join(f"{each:.1f}" for each in results["host"]["load_average"])
    text = f"# Weight sync, measured\n\n{notes}; medians of {results['repetitions']}.\n\n{table(results)}"
    (folder / "sync.md").write_text(text, encoding="utf-8")
    plot(results, folder / "sync.svg")


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Bars: seconds of each method, a panel per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = results["cases"]
    figure, panels = pyplot.subplots(1, len(cases), figsize=(3.4 * len(cases), 3.6), squeeze=False, sharey=True)
    for panel, (name, case) in zip(panels[0], cases.items(), strict=True):
        methods = list(case["medians_s"])
        seconds = [case["medians_s"][method]["total"] for method in methods]
        colors = ["C0" if m.startswith("ours") else "C7" if m.startswith("floor") else "C1" for m in methods]
        panel.barh(methods, seconds, color=colors)
        panel.set_title(name, fontsize=9)
        panel.set_xscale("log")
        panel.set_xlabel("seconds")
        panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
