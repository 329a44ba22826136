"""Bounds of histogram buckets, fine enough for quantiles that are right within 10 %."""

import math

# Prometheus interpolates within the bucket that holds a quantile. Where all of its values are equal, the quantile is
# wrong by at most the bucket's width: 10^(1/25) - 1 = 9.65 %, or 9.69 % with the rounding of the bounds.
PER_DECADE = 25


def fine_buckets(first: float, last: float) -> tuple[float, ...]:
    """Return bounds from `first` on, PER_DECADE per power of ten, up to the first that is not below `last`.

    Cost: a series each, for every set of labels. For a label with many values take plain decades, and show means.

    >>> fine_buckets(1, 1.3)
    (1.0, 1.096, 1.202, 1.318)
    >>> len(fine_buckets(0.001, 300))
    138
    """
    count = math.ceil(PER_DECADE * math.log10(last / first) - 1e-9)
    return tuple(float(f"{first * 10 ** (step / PER_DECADE):.4g}") for step in range(count + 1))
