"""`make chaos` in short: real engines, and faults that are over in seconds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TOOLS = ("ip", "iptables", "mount", "redis-server")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(800),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks and disks of its own need root"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]


@pytest.mark.parametrize("schedule", ["async"])
def test_a_run_outlives_what_is_over_in_seconds(tmp_path: Path, schedule: str) -> None:
    command = [sys.executable, "-m", "tools.chaos", "--short", "--runs", schedule, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (story,) = json.loads((tmp_path / "chaos.json").read_text())
    assert len(story["measured"]) == 5
    assert story["wrong"] == []
    assert story["samples"]["dropped"] == 0
    assert (tmp_path / "chaos.png").stat().st_size > 0
