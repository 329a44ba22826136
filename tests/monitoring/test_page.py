"""The run's web page in a real browser: headless Chromium loads it from a real coordinator and draws its data."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.redis.records import PAGE_URL
from servicekit.redis.registry import Registry
from tandem_config.schema import ASYNC_DEFAULTS, RunConfig
from tests.contract.coordinator_runs import rows, with_settings, write_config
from tests.contract.test_coordinator_process import Start, fleet_arguments
from tests.kit.waiting import until
from tests.monitoring.browser import browser

pytestmark = [pytest.mark.integration]

UP_S = 60.0


# Of parts, marks and versions on the time line.
TITLES = "[...document.querySelectorAll('#timeline title')].map(one => one.textContent)"
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"schedule": {"kind": "async"}, "grpo": {"correction": "importance"}, **ASYNC_DEFAULTS},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_browser_draws_the_run(
    config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setenv("TANDEM_WEB_PORT", "0")
    config = with_settings(config, run={"iterations": 1_000_000, "checkpoint_every": 100, "startup_timeout_s": 60})
    config = with_settings(config, **SCHEDULES[kind])
    start(*fleet_arguments(environment))
    start("coordinator", "--config", write_config(config, tmp_path))
    registry = Registry(environment.redis_url, environment.run_id)
    url = registry.wait_value(PAGE_URL, UP_S)
    registry.close()
    until(lambda: (environment.run_dir / "metrics.jsonl").exists() and len(rows(environment)) > 12, UP_S)
    with browser() as page:
        page.open(
            url, ready="document.querySelectorAll('.curve').length >= 8 && document.querySelector('#iterations rect')"
        )
        document = page.eval("document.documentElement.outerHTML")
        titles = page.eval(TITLES)
        numbers = page.eval("[...document.querySelectorAll('#timeline .tick')].map(one => one.firstChild.textContent)")
        assert page.logged == []
        page.open(f"{url}#view=samples&kind=heldout&iteration=0", ready="document.querySelector('.card')")
        assert page.eval("document.querySelector('.card pre').textContent").endswith("<eos>")
    assert '<span id="state" class="badge running">running</span>' in document
    assert '<span id="gone" class="gone" hidden' in document
    drawn = re.findall(r'class="curve" d="M([^"]+)"', document)
    long = [path.count("L") >= 5 for path in drawn if "H" not in path]
    assert all(long) or (kind == "async" and sum(long) >= 8)  # it compares log-probs each 20 iterations
    assert {"rollout-0", "rollout-1"} <= set(re.findall(r"<td>([^<]+)</td>", document))
    assert document.count("<rect") >= 10
    assert {"trainer", "rollout-0", "rollout-1"} <= set(numbers)
    assert any(number.isdecimal() for number in numbers), numbers
    assert {"generate", "reward", "train", "sync", "report"} <= {title.partition(":")[0] for title in titles}
    assert any(re.match(r"rollout-1: version \d+ since ", title) for title in titles), titles
    assert any(re.match(r"rollout-1 got version \d+ at ", title) for title in titles), titles
    assert not any("left out" in title or "given up" in title for title in titles), titles
    assert {"generate", "transfer"} <= set(html.unescape(re.sub(r"<[^>]+>", " ", document)).split())
