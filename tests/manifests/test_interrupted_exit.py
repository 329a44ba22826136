"""A coordinator that is evicted must not look finished: a Job would take exit 0 for the end of the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_GIVEN_UP
from servicekit.redis.registry import Registry
from tests.house.repository import REPO
from tests.manifests.kustomize import find, overlay

pytestmark = pytest.mark.integration
START_S, END_S = 60.0, 30.0
RUN_ID = "interrupted"


def test_it_ends_with_the_code_that_the_job_ignores(redis_server: str, tmp_path: Path) -> None:
    job = find(overlay("cluster"), "Job", "coordinator")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    arguments = container["args"][container["args"].index("--resume") :]
    environment = os.environ | {
        "REDIS_URL": redis_server,
        "TANDEM_RUN_ID": RUN_ID,
        "TANDEM_RUN_DIR": str(tmp_path),
    }
    config = str(REPO / "examples" / "arithmetic" / "arithmetic.yaml")
    command = [sys.executable, *container["command"][1:], "--config", config, *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    registry = Registry(redis_server, RUN_ID)
    try:
        registry.wait_for("coordinator", ["coordinator"], START_S)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=END_S)
    finally:
        process.kill()
        registry.close()
    actions = {
        value: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for value in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions[code] == "Ignore"
    assert actions[EXIT_BAD_CONFIG] == actions[EXIT_GIVEN_UP] == "FailJob"
    assert actions[int(arguments[arguments.index("--retry-exit") + 1])] == "Ignore"
