"""A week in fast motion, cut short: hundreds of iterations of the real coordinator, in which nothing may grow."""

from pathlib import Path

import pytest

from tools.week.__main__ import live


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_nothing_grows_over_some_hundred_iterations(tmp_path: Path) -> None:
    week = live(tmp_path / "week", 700, every=50, most_s=600)
    print(week.report())
    assert week.iterations == 700
    assert week.wrong == []
    assert week.proof.startswith("proven")
    assert week.proof_s < 60
