"""Simulated rounds against real ones: real members, gloo and Redis; the machine's speeds measured in the same run."""

import pytest

from tools.measured_rounds.compare import Case, UnsteadyMachine, compare
from weightsync.layouts.layout import Parallel

# Slow, not because it takes long, but because it compares times: other work on the machine can spoil a try.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.alone]
TRIES = 3
TOLERANCE = 0.30
TP2 = Parallel(tensor=2)


@pytest.mark.parametrize(
    "case",
    [
        Case(hidden=512, trainer=TP2, rollout=Parallel(), replicas=1),
        Case(hidden=512, trainer=TP2, rollout=Parallel(), replicas=4),
        Case(hidden=1024, trainer=TP2, rollout=TP2, replicas=1),
        Case(hidden=1024, trainer=TP2, rollout=Parallel(), replicas=2),
    ],
    ids=lambda case: f"{case.hidden}-{case.replicas}x{case.rollout.tensor}",
)
def test_a_simulated_round_takes_as_long_as_a_real_one(case: Case, redis_server: str) -> None:
    ratios: list[float] = []
    while len(ratios) < TRIES:
        try:
            ratios.append(compare(case, redis_server).ratio)
        except UnsteadyMachine as error:
            pytest.skip(f"nothing can be timed here now: {error}")
        if abs(ratios[-1] - 1) <= TOLERANCE:
            return
    pytest.fail(f"simulated / measured seconds in {TRIES} tries: {[f'{ratio:.2f}' for ratio in ratios]}")
