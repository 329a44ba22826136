"""`make bench-train` for real, at its smallest: ways compute the same step, and their figures are written down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_train.__main__ import TRL_PYTHON

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WAYS = ["ours_tp1", "ours_tp2", "padded", "floor"]


@pytest.mark.slow
def test_a_model_is_measured_compared_and_written(tmp_path: Path) -> None:
    ways = [*WAYS, "trl"] if TRL_PYTHON.exists() else WAYS  # TRL's environment is made by `make bench-train` only
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench_train", "--shapes", "tiny", "--repetitions", "2"]
    options = ["--lengths", "equal", "long_tail", "--threads", "2", "--out", str(tmp_path), "--ways", *ways]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((tmp_path / "train.json").read_text(encoding="utf-8"))
    assert list(written["ratios"]) == ["long_tail_vs_padded", "equal_vs_padded"]
    for name in ("tiny, equal", "tiny, long_tail"):
        case = written["cases"][name]
        assert set(case["medians_s"]) == set(ways)
        assert min(case["peak_mib"].values()) > min(case["rise_mib"].values()) >= 0
        for found in case["agreement"].values():
            assert found["loss_difference"] < 1e-6
            assert found["weight_difference"] < 1e-2 * found["largest_weight_change"]
    assert "| tiny, long_tail |" in (tmp_path / "train.md").read_text(encoding="utf-8")
