"""Writes train.json, and its figures as a page and a plot."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench_train.report.figures import TARGETS

BEGIN, END = "<!-- written by make bench-train -->", "<!-- end of bench-train -->"
_RATIOS = ("vs_padded", "vs_trl", "vs_floor")
_MIB = 1024.0


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write train.json, train.md and train.svg, and the summary into the folder's README.md if it has the markers."""
    folder.mkdir(parents=True, exist_ok=True)
    refresh(folder / "README.md", results)
    (folder / "train.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "train.md").write_text(page(results), encoding="utf-8")
    plot(results, folder / "train.svg")


def refresh(path: Path, results: Mapping[str, Any]) -> None:
    """Write the summary between the markers of a page; does nothing without the page or its markers."""
    if path.exists():
        head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if begin and end:
            path.write_text(f"{head}{BEGIN}\n{summary(results)}{END}{tail}", encoding="utf-8")


def summary(results: Mapping[str, Any]) -> str:
    """Make two tables: the headline ratios with their targets, and tokens per second of every way."""
    lines = ["| ratio | wanted | measured |", "|---|---|---|"]
    lines += [
        f"| {name} | {wanted} | {results['ratios'][name]:.2f} |"
        for name, wanted in TARGETS.items()
        if name in results["ratios"]
    ]
    conditions = f"Run of {results['run']}, commit {results['commit'] or 'unknown'}, {results['threads']} threads a way"
    load = max(case["load_average_before"][0] for case in results["cases"].values())
    note = f"{conditions}; load average before a case at most {load:.1f}."
    return "\n".join([*lines, "", *_rates(results["cases"]), "", note]) + "\n"


def page(results: Mapping[str, Any]) -> str:
    """Make train.md: ratios, tokens per second, seconds, memory, agreement, conditions, definitions."""
    cases, host = results["cases"], results["host"]
    parts = {
        "Tokens per second": _rates(cases),
        "How many times faster": _ratios(cases),
        "Seconds of a step": _table(cases, "medians_s", lambda value: f"{value:.3f}"),
        "Peak memory, GiB": _table(cases, "peak_mib", lambda value: f"{value / _MIB:.2f}"),
        "Of it above what is held between steps, GiB": _table(cases, "rise_mib", lambda value: f"{value / _MIB:.2f}"),
        "Agreement with `padded`": _agreement(cases),
        "Conditions": _conditions(cases),
        "Definitions": [f"* **{name}**: {text}" for name, text in results["definitions"].items()],
    }
    runs = len({case["run"] for case in cases.values()})
    head = (
        f"Runs: {runs}, the last begun {results['run']}, commit {results['commit'] or 'unknown'}; {host['cpu']}, "
        f"{host['cores']} cores, {results['threads']} threads a way, float32. Written by `make bench-train`; what the "
        "columns mean stands below."
    )
    lines = ["# A train step, measured", "", head]
    for title, part in parts.items():
        lines += ["", f"## {title}", "", *part]
    return "\n".join(lines) + "\n"


def _rates(cases: Mapping[str, Any]) -> list[str]:
    return _table(cases, "tokens_per_s", lambda value: f"{value:.0f}")


def _table(cases: Mapping[str, Any], key: str, shown: Any) -> list[str]:
    ways = list(dict.fromkeys(way for case in cases.values() for way in case[key]))
    lines = [f"| case | {' | '.join(ways)} |", "|---" * (1 + len(ways)) + "|"]
    for name, case in cases.items():
        cells = [shown(case[key][way]) if way in case[key] else "" for way in ways]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _ratios(cases: Mapping[str, Any]) -> list[str]:
    lines = [f"| case | layout | {' | '.join(_RATIOS)} |", "|---" * (2 + len(_RATIOS)) + "|"]
    for name, case in cases.items():
        for way, found in case["ratios"].items():
            cells = [f"{found[ratio]:.2f}" if ratio in found else "" for ratio in _RATIOS]
            lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    return lines


def _agreement(cases: Mapping[str, Any]) -> list[str]:
    keys = ("loss_difference", "weight_difference", "largest_weight_change")
    lines = [f"| case | way | {' | '.join(keys)} |", "|---" * (2 + len(keys)) + "|"]
    for name, case in cases.items():
        for way, found in case["agreement"].items():
            lines.append(f"| {name} | {way} | {' | '.join(f'{found[key]:.1e}' for key in keys)} |")
    return lines


def _conditions(cases: Mapping[str, Any]) -> list[str]:
    keys = ("parameters", "samples", "tokens", "longest", "repetitions", "seconds")
    lines = [f"| case | {' | '.join(keys)} | GFLOP | GFLOP/s | load before, after |", "|---" * (4 + len(keys)) + "|"]
    for name, case in cases.items():
        rate = "" if case["flops_per_s"] is None else f"{case['flops_per_s'] / 1e9:.0f}"
        load = ", ".join(f"{case[key][0]:.1f}" for key in ("load_average_before", "load_average_after"))
        cells = [str(case[key]) for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} | {case['flops'] / 1e9:.0f} | {rate} | {load} |")
    return lines


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw tokens per second of each way as bars, a panel per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = results["cases"]
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), squeeze=False, sharey=True)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (name, case) in zip(panels.flat, cases.items(), strict=False):
        ways = list(case["tokens_per_s"])
        colors = ["C0" if way.startswith("ours") else "C7" if way == "floor" else "C1" for way in ways]
        panel.barh(ways, [case["tokens_per_s"][way] for way in ways], color=colors)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("tokens/s")
    panels.flat[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
