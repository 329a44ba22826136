"""A rank that reads, writes, compiles or locks memory for longer than a collective of a device may take ends nothing.

With NCCL the watchdog would end the process; here gloo's collectives of Megatron's groups fail in its place.
"""

import json
from pathlib import Path

import pytest

from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.integration.trainer.slow_worker import MOMENTS
from tests.kit.models import save_model

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]
# Where the second rank has nothing to write; and where it has what rank 0 exports, and memory of its own.
OF_SLICES = ("taking tensors", "bringing memory back")
CASES = {
    "copies": LAYOUTS["dp2-zero"],
    "slices": LAYOUTS["tp2"] | {"offload": {"optimizer": True}},
}


def test_the_trainer_lives(tmp_path: Path) -> None:
    save_model("qwen2-tied", tmp_path / "model")
    cases = [
        {
            "name": name,
            "model": str(tmp_path / "model"),
            "trainer": trainer,
            "moments": [moment for moment in MOMENTS if (moment in OF_SLICES) == (name == "slices")],
        }
        for name, trainer in CASES.items()
    ]
    (tmp_path / "cases-2.json").write_text(json.dumps(cases))
    launch(2, tmp_path, "tests.integration.trainer.slow_worker")
    seen = [
        moment
        for name in CASES
        for rank in range(2)
        for moment in (tmp_path / name / f"rank{rank}.txt").read_text().splitlines()
    ]
    assert sorted(seen) == sorted(MOMENTS), "a moment that has not come"
