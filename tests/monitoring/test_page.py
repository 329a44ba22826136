"""The run's web page in a real browser: headless Chromium loads it from a real coordinator and draws its data."""

import html
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.redis.records import PAGE_URL
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, with_settings, write_config
from tests.contract.test_coordinator_process import Start, fleet_arguments
from tests.kit.waiting import until
from tests.monitoring.tools import tool

pytestmark = [pytest.mark.integration]

UP_S = 60.0
# A browser starts in a second on an idle machine.
BROWSER_S = 120.0


def render(url: str) -> tuple[str, str]:
    """Returns the document as the browser has it after the page's script has run, and what it logged."""
    # Not tmp_path: the browser's sockets live in its profile, and their paths are short.
    with tempfile.TemporaryDirectory(prefix="chr") as profile:
        command = [tool("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"]
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=BROWSER_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_a_browser_draws_the_run(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("chromium")
    monkeypatch.setenv("TANDEM_WEB_PORT", "0")
    config = with_settings(config, run={"iterations": 1_000_000, "checkpoint_every": 100, "startup_timeout_s": 60})
    start(*fleet_arguments(environment))
    start("coordinator", "--config", write_config(config, tmp_path))
    registry = Registry(environment.redis_url, environment.run_id)
    url = registry.wait_value(PAGE_URL, UP_S)
    registry.close()
    until(lambda: (environment.run_dir / "metrics.jsonl").exists() and len(rows(environment)) > 12, UP_S)
    document, logged = render(url)
    assert logged == ""
    assert '<span id="state" class="badge running">running</span>' in document
    assert '<span id="gone" class="gone" hidden' in document
    drawn = re.findall(r'class="curve" d="M([^"]+)"', document)
    assert len(drawn) >= 8
    assert all(path.count("L") >= 5 for path in drawn if "H" not in path)
    assert {"rollout-0", "rollout-1"} <= set(re.findall(r"<td>([^<]+)</td>", document))
    assert document.count("<rect") >= 10
    assert "transfer" in html.unescape(re.sub(r"<[^>]+>", " ", document))
