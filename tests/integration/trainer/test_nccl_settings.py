"""A trainer rank, as a process, settles NCCL's settings before it loads anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

TRAINER = """
import sys
from trainer_service import __main__ as trainer, app
from weightsync.membership import nccl_settings
app.run = lambda settings: 0
nccl_settings.settle_nccl_settings = lambda **_: print("settled")
sys.exit(trainer.main(["--config", sys.argv[1]]))
"""


@pytest.mark.parametrize("transport", ["auto", "disk"])
def test_a_trainer_rank_settles_with_every_transport(transport: str, tmp_path: Path) -> None:
    """Ranks on GPUs compare the settings before they agree on a transport."""
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: m}}\ndata: {{train: t}}\nsync: {{transport: {transport}}}\n")
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ours = {"REDIS_URL": "redis://127.0.0.1:1/0", "TANDEM_RUN_ID": "r", "TANDEM_RUN_DIR": str(tmp_path)}
    command = [sys.executable, "-c", TRAINER, str(file)]
    done = subprocess.run(command, env={**os.environ, **place, **ours}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "settled" in done.stdout
