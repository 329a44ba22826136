"""Computes figures from samples: medians and paired ratios."""

from collections.abc import Mapping, Sequence
from statistics import median

Samples = Mapping[str, Sequence[Mapping[str, float]]]  # by method; seconds by part per repetition, in order

# name: (numerator, its part, denominator, its part)
Ratios = Mapping[str, tuple[str, str, str, str]]

RATIOS: Ratios = {
    "vs_stock_flattened": ("stock_flattened", "total", "ours_in_place", "total"),
    "vs_stock_per_tensor": ("stock_per_tensor", "total", "ours_in_place", "total"),
    "vs_disk": ("stock_disk", "total", "ours_in_place", "total"),
    "vs_floor": ("floor_gloo", "total", "ours_in_place", "total"),
    "colocated_vs_collective": ("ours_in_place", "total", "ours_colocated_in_place", "total"),
    "staged_pause_share": ("ours_staged", "pause", "ours_in_place", "pause"),
}
MORE_RATIOS: Ratios = {
    "vs_floor_transfer": ("floor_gloo", "total", "ours_in_place", "transfer"),
    "vs_memcpy_colocated": ("floor_memcpy", "total", "ours_colocated_in_place", "total"),
    "colocated_vs_collective_transfer": ("ours_in_place", "transfer", "ours_colocated_in_place", "transfer"),
    "colocated_vs_stock_flattened": ("stock_flattened", "total", "ours_colocated_in_place", "total"),
    "colocated_vs_disk": ("stock_disk", "total", "ours_colocated_in_place", "total"),
    "staged_pause_share_generating": ("ours_staged_generating", "pause", "ours_in_place_generating", "pause"),
    "stock_pause_vs_staged_pause": ("stock_flattened", "pause", "ours_staged", "pause"),
}


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    """Compute the median seconds by method and part."""
    return {
        method: {part: round(median(run[part] for run in runs), 6) for part in runs[0]}
        for method, runs in samples.items()
    }


def ratios(samples: Samples) -> dict[str, float]:
    """Compute the ratios that have a target.

    >>> ratios({"ours_in_place": [{"total": 1.0}, {"total": 2.0}], "stock_disk": [{"total": 4.0}] * 2})
    {'vs_disk': 3.0}
    """
    return _paired(RATIOS, samples)


def more_ratios(samples: Samples) -> dict[str, float]:
    """Compute the ratios that explain those of `ratios`."""
    return _paired(MORE_RATIOS, samples)


def _paired(wanted: Ratios, samples: Samples) -> dict[str, float]:
    """Compute the median over repetitions of each ratio whose methods were measured."""
    found = {}
    for name, (above, above_part, below, below_part) in wanted.items():
        if above in samples and below in samples:
            pairs = zip(samples[above], samples[below], strict=True)
            found[name] = round(median(a[above_part] / b[below_part] for a, b in pairs), 4)
    return found
