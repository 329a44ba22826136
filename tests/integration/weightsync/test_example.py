"""The example of weightsync by itself runs as its first lines say, and what it prints is so."""

import re
import subprocess
import sys

import pytest

from tests.house.repository import REPO

pytestmark = pytest.mark.integration


def test_a_model_goes_from_one_process_to_another(redis_server: str) -> None:
    command = [sys.executable, "-m", "examples.weight_sync", redis_server]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = re.search(r"trainer/0: ([\d,]+) bytes sent", done.stdout)
    received = re.search(r"rollout/0: 0 bytes sent, ([\d,]+) of ([\d,]+) received", done.stdout)
    assert sent is not None, done.stdout
    assert received is not None, done.stdout
    assert sent[1] == received[1] == received[2]
