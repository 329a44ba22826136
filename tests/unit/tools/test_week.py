"""The verdict over a run in fast motion: what grows is named, noise and a warm-up are not."""

from dataclasses import replace
from typing import Any

import pytest

from tools.week.observed import Look, problems

FLAT = Look(
    iteration=0,
    iteration_s=0.03,
    cpu_s=0.02,
    rss_mib=180.0,
    descriptors=28,
    threads=19,
    written_bytes=36_000.0,
    row_bytes=2_440.0,
    folder_bytes=2**20,
    num_files=30,
    num_stored=100,
)


def looks(**growth: float) -> list[Look]:
    """Looks at a run in which fields grow by so much from look to look."""
    grown: list[dict[str, Any]] = [
        {name: getattr(FLAT, name) + number * by for name, by in growth.items()} for number in range(20)
    ]
    return [replace(FLAT, iteration=100 * number, **fields) for number, fields in enumerate(grown, start=1)]


def test_a_flat_run_has_no_problem() -> None:
    noisy = [
        replace(
            one, iteration_s=one.iteration_s * (1 + number % 3), rss_mib=180 + number % 5, descriptors=26 + number % 4
        )
        for number, one in enumerate(looks())
    ]
    assert problems(noisy) == []
    warm = [replace(one, rss_mib=one.rss_mib + 500, cpu_s=9.0) if one.iteration <= 200 else one for one in looks()]
    assert problems(warm) == []
    assert problems(looks()[:1]) == ["1 looks are too few to compare halves"]


@pytest.mark.parametrize(
    ("field", "by"),
    [
        ("cpu_s", 0.001),
        ("iteration_s", 0.002),
        ("rss_mib", 1.0),
        ("descriptors", 1),
        ("threads", 1),
        ("num_files", 1),
        ("written_bytes", 400.0),
        ("row_bytes", 20.0),
    ],
)
def test_what_grows_is_named(field: str, by: float) -> None:
    (found,) = problems(looks(**{field: by}))
    assert (field if field != "rss_mib" else "memory") in found
