"""Computes figures from steps: paired ratios, and the headline ones."""

from collections.abc import Mapping
from statistics import median
from typing import Any

Runs = dict[str, list[dict[str, float]]]  # by way; the measurements of each step, in order

OTHERS = ("padded", "trl", "floor")
# name: its target
TARGETS = {"long_tail_vs_padded": ">= 2", "equal_vs_padded": ">= 1", "vs_floor_100m": ">= 0.6"}


def ratios(runs: Runs) -> dict[str, dict[str, float]]:
    """Compute how many times faster ours is, by layout and other way: the median of the pairs of one repetition.

    >>> ratios({"ours_tp1": [{"seconds": 1.0}, {"seconds": 2.0}], "padded": [{"seconds": 4.0}] * 2})
    {'ours_tp1': {'vs_padded': 3.0}}
    """
    return {
        way: {f"vs_{other}": _paired(runs[other], runs[way]) for other in OTHERS if other in runs}
        for way in runs
        if way.startswith("ours")
    }


def _paired(above: list[dict[str, float]], below: list[dict[str, float]]) -> float:
    pairs = zip(above, below, strict=True)
    return round(median(a["seconds"] / b["seconds"] for a, b in pairs), 4)


def headline(cases: Mapping[str, Any]) -> dict[str, float]:
    """Choose the ratios of the targets, at one rank: for lengths those of the model at which they are lowest.

    >>> case = {"ratios": {"ours_tp1": {"vs_padded": 2.5, "vs_floor": 0.5}}}
    >>> headline({"10m, long_tail": case, "100m, equal": case})
    {'long_tail_vs_padded': 2.5, 'equal_vs_padded': 2.5, 'vs_floor_100m': 0.5}
    """
    found = {}
    for lengths in ("long_tail", "equal"):
        at = [case["ratios"].get("ours_tp1", {}) for name, case in cases.items() if name.endswith(f", {lengths}")]
        values = [ratio["vs_padded"] for ratio in at if "vs_padded" in ratio]
        if values:
            found[f"{lengths}_vs_padded"] = min(values)
    floor = cases.get("100m, equal", {"ratios": {}})["ratios"].get("ours_tp1", {})
    if "vs_floor" in floor:
        found["vs_floor_100m"] = floor["vs_floor"]
    return found
