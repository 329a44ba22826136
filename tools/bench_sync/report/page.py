"""Writes sync.json, and its figures as a page and a plot."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = ("prepare", "stop", "transfer", "verify", "commit")

# name: its target at the headline case
TARGETS = {
    "vs_stock_flattened": ">= 3",
    "vs_disk": ">= 3",
    "vs_floor": ">= 0.8",
    "colocated_vs_collective": ">= 3",
    "staged_pause_share": "<= 0.1",
}
BEGIN, END = "<!-- written by make bench-sync -->", "<!-- end -->"


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write sync.json, sync.md and sync.svg, and the summary into the folder's README.md if it has the markers."""
    folder.mkdir(parents=True, exist_ok=True)
    refresh(folder / "README.md", results)
    (folder / "sync.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "sync.md").write_text(page(results), encoding="utf-8")
    plot(results, folder / "sync.svg")


def refresh(path: Path, results: Mapping[str, Any]) -> None:
    """Write the summary between the markers of a page; does nothing without the page or its markers."""
    if path.exists():
        head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if begin and end:
            path.write_text(f"{head}{BEGIN}\n{summary(results)}{END}{tail}", encoding="utf-8")


def summary(results: Mapping[str, Any]) -> str:
    """Make a table of ratios and targets, with a column per case."""
    cases = {name: case["ratios"] for name, case in results["cases"].items()}
    lines = [f"| ratio | wanted | {' | '.join(cases)} |", "|---" * (2 + len(cases)) + "|"]
    for name in dict.fromkeys(name for found in cases.values() for name in found):
        cells = [f"{found[name]:.2f}" if name in found else "" for found in cases.values()]
        lines.append(f"| {name} | {TARGETS.get(name, '')} | {' | '.join(cells)} |")
    rounds = [f"{case['medians_s']['ours_in_place']['total'] * 1e3:.0f}" for case in results["cases"].values()]
    lines.append(f"| round in place, ms | tiny: <= 50 | {' | '.join(rounds)} |")
    load = max(case["load_average_at_first_sample"][0] for case in results["cases"].values())
    begun = f"Runs: {len(results['runs'])}, the first begun {results['runs'][0]}"
    note = f"{begun}; highest load average at a first sample {load:.1f}"
    return "\n".join([*lines, "", f"{note}. The targets are for `{results['headline']}`."]) + "\n"


def page(results: Mapping[str, Any]) -> str:
    """Make sync.md: ratios, milliseconds, conditions, definitions."""
    runs, host = results["runs"], results["host"]
    made = "One run" if len(runs) == 1 else f"{len(runs)} runs of `make bench-sync` and its `--only`, merged"
    lines = [
        "# Weight sync, measured",
        "",
        f"{made}, begun {', '.join(runs)}; {host['cpu']}, {host['cores']} cores, bfloat16, gloo. Written by "
        "`make bench-sync`; what the columns mean stands below.",
        "",
        "## Ratios",
        "",
        *_ratio_table(results, "ratios"),
        "",
        "## More ratios",
        "",
        *_ratio_table(results, "more_ratios"),
        "",
        "## Milliseconds",
        "",
        *_table(results),
        "",
        "## Conditions",
        "",
        *_conditions(results),
        "",
        "## Definitions",
        "",
        *(f"* **{name}**: {text}" for name, text in results["definitions"].items()),
    ]
    return "\n".join(lines) + "\n"


def _ratio_table(results: Mapping[str, Any], key: str) -> list[str]:
    names = list(dict.fromkeys(name for case in results["cases"].values() for name in case[key]))
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, found in results["cases"].items():
        lines.append(f"| {case} | {' | '.join(f'{found[key][n]:.2f}' if n in found[key] else '' for n in names)} |")
    return lines


def _table(results: Mapping[str, Any]) -> list[str]:
    lines = [f"| case | method | total | pause | {' | '.join(PARTS)} |", "|---" * (4 + len(PARTS)) + "|"]
    for name, case in results["cases"].items():
        for method, parts in case["medians_s"].items():
            cells = [f"{parts[part] * 1e3:.1f}" if part in parts else "" for part in ("total", "pause", *PARTS)]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return lines


def _conditions(results: Mapping[str, Any]) -> list[str]:
    lines = ["| case | MB | measured | commit | repetitions | load before, at first sample, after |", "|---" * 6 + "|"]
    for name, case in results["cases"].items():
        keys = ("load_average_before", "load_average_at_first_sample", "load_average_after")
        load = ", ".join(f"{case[key][0]:.1f}" for key in keys)
        size, when = case["bytes"] / 1e6, case["measured"]
        lines.append(f"| {name} | {size:.1f} | {when} | {case['commit']} | {case['repetitions']} | {load} |")
    return lines


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds of each method as bars, a panel per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = results["cases"]
    columns = 3
    rows = -(-len(cases) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, sharey=True)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (name, case) in zip(panels.flat, cases.items(), strict=False):
        methods = list(case["medians_s"])
        seconds = [case["medians_s"][method]["total"] for method in methods]
        colors = ["C0" if m.startswith("ours") else "C7" if m.startswith("floor") else "C1" for m in methods]
        panel.barh(methods, seconds, color=colors)
        panel.set_title(name, fontsize=9)
        panel.set_xscale("log")
        panel.set_xlabel("seconds")
    panels.flat[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
