"""The loop computes advantages as the section `grpo` says."""

from typing import Any

import numpy as np
import pytest

from coordinator.steps import compute_advantages
from tandem_clients.flow import GroupScores
from tandem_config.schema import GrpoSection

REWARDS = np.array([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("grpo", "advantages", "dropped"),
    [
        ({"preset": "dr_grpo"}, [[2.0, -1.0, -1.0], [0.0] * 3], [False, False]),
        ({"baseline": "leave-one-out", "advantage_std": "none"}, [[3.0, -1.5, -1.5], [0.0] * 3], [False, False]),
        ({"preset": "dapo", "advantage_std": "none"}, [[2.0, -1.0, -1.0], [0.0] * 3], [False, True]),
    ],
)
def test_settings_reach_the_advantages(
    grpo: dict[str, Any], advantages: list[list[float]], dropped: list[bool]
) -> None:
    found = compute_advantages(GrpoSection(**grpo), GroupScores(rewards_PG=REWARDS, accuracy=0.0))
    assert found.advantages_PG.tolist() == advantages
    assert found.dropped_P.tolist() == dropped
