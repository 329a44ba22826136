"""Bounds of histograms."""

from itertools import pairwise

import pytest

from servicekit.buckets import fine_buckets


@pytest.mark.parametrize(("first", "last"), [(0.001, 300), (0.001, 3600), (0.01, 1000), (0.01, 3600)])
def test_neighbouring_bounds_differ_by_less_than_a_tenth(first: float, last: float) -> None:
    bounds = fine_buckets(first, last)
    assert bounds[0] == first
    assert bounds[-2] < last <= bounds[-1]
    assert all(1.09 < upper / lower < 1.097 for lower, upper in pairwise(bounds))


def test_their_number_is_what_the_documents_say() -> None:
    assert (len(fine_buckets(0.001, 300)), len(fine_buckets(0.001, 3600))) == (138, 165)
