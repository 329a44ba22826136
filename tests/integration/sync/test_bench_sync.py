"""`make bench-sync` for real, at its smallest: every method over real SGLang engines, compared, and written down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tools.test_bench_sync import CONTRACT
from tools.bench_sync.methods.registry import BUSY, METHODS

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

CASE = "tiny, TP2 -> TP2"


def test_one_case_is_measured_and_written(tmp_path: Path) -> None:
    methods = [method for method in METHODS if method not in BUSY]
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench_sync", "--only", CASE, "--repetitions", "1"]
    done = subprocess.run(
        [*command, "--methods", *methods, "--out", str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((tmp_path / "sync.json").read_text(encoding="utf-8"))
    assert list(written["cases"]) == [CASE]
    assert list(written["ratios"]) == CONTRACT
    assert min(written["ratios"].values()) > 0
    assert set(written["cases"][CASE]["medians_s"]) == set(methods)
    assert CASE in (tmp_path / "sync.md").read_text(encoding="utf-8")
    assert "<svg" in (tmp_path / "sync.svg").read_text(encoding="utf-8")
