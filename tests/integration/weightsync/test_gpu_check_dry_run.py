"""`python -m tools.gpu_check --device cpu`: all of it, with real Megatron and SGLang.

test_gpu_check.py beside it has a round alone, and sees it fail; tests/unit/tools has what each verdict refuses.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository import REPO
from tools.gpu_check.__main__ import CONTAINERS
from tools.gpu_check.services.trainers import TRAINERS

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

CHECKS = [
    "in_place round",
    "in_place round: log-probs",
    "staged round",
    "staged round: log-probs",
    "keep_kv round",
    "keep_kv round: log-probs",
    "keep_kv round: versions of tokens",
    "resume: two train steps",
    "round after the trainer's restart",
    "round after the trainer's restart: log-probs",
    "peak memory per rank",
    "services, dense, TP2 -> TP2: to its end",
    "round over a chain of two replicas",
    "round over a chain of two replicas: log-probs",
    "receiver killed in TRANSFER",
    "receiver killed at the first use of its connections",
    "peak memory per rank",
    "services, deaths, TP2 -> 2 x TP1: to its end",
    "mixture of experts: in_place round",
    "mixture of experts: in_place round: log-probs",
    "mixture of experts: staged round",
    "mixture of experts: staged round: log-probs",
    "peak memory per rank",
    "services, mixture, TP2 EP2 -> TP2 EP2: to its end",
    *(
        line
        for what, shapes in TRAINERS.items()
        for line in (
            f"{shapes[0].name}: two steps",
            "peak memory per rank",
            f"services, {what}, {shapes[0].name}: to its end",
        )
    ),
]


def test_everything_runs_and_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_check", "--device", "cpu", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert [(check["name"], check["passed"]) for check in report["services"]] == [(name, True) for name in CHECKS]
    assert [check["passed"] for check in report["attention"]] == [True] * 4
    cases = report["cases"]
    assert {(case["name"].split()[0], case["exact"]) for case in cases} == {("collective", True), ("colocated", True)}
    assert all(case["segments_per_s"] > 0 for case in cases)
    assert report["skipped"] == [
        CONTAINERS,
        "colocated between GPUs: all ranks of those cases are on the first of 4",
    ]
