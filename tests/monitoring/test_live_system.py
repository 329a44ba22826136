"""The arithmetic demo, shortened, with its real engines, under a real Prometheus: every query of a panel has data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from servicekit.redis.registry import Registry
from tandem_files.run_folder import read_notes
from tests.e2e.conftest import EXAMPLE, STARTED_S, Tandem
from tests.kit.waiting import until
from tests.monitoring.boards import ALL, OF_OTHER_RUNS
from tests.monitoring.live import TOTAL_S, prometheus

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

# Enough iterations for Prometheus to scrape some seconds of it on an idle machine.
SETTINGS = {
    "run.iterations": 25,
    "run.checkpoint_every": 5,
    "run.evaluate_every": 5,
    "rollout.replicas": 2,
}
ENDED_S = 500.0
RULES_S = 30.0
ROLES = ("coordinator", "trainer", "rollout")


def targets(registry: Registry) -> dict[str, dict[str, str]]:
    """Where each service says that its metrics are, by job and replica."""
    return {
        role: {record.name if role == "rollout" else "": record.metrics_address for record in registry.list(role)}
        for role in ROLES
    }


def test_every_panel_has_data(redis_server: str, tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    changes = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    run = tandem("run", "-c", str(EXAMPLE), "--set", "run.name=watched", *changes, redis_url=redis_server)
    run.wait_up("coordinator")
    notes = read_notes(tmp_path / "runs" / "watched")
    assert notes is not None
    registry = Registry(redis_server, notes.run_id)
    until(lambda: all(len(found) > 0 for found in targets(registry).values()), STARTED_S)
    until(lambda: len(targets(registry)["rollout"]) == 2, STARTED_S)
    with prometheus(tmp_path, targets(registry)) as server:
        registry.close()
        assert run.wait_end(ENDED_S) == 0, run.output()
        left = server.without_data([query for query in ALL if not any(name in query.expr for name in OF_OTHER_RUNS)])
        assert [f"{query}: {query.over('1m')}" for query in left] == []
        # What is not always 0: it comes from the engines.
        for busy in ("tandem_engine_requests", "tandem_kv_cache_usage_ratio", "tandem_running_groups"):
            assert max(server.values(busy)) > 0, busy
        # The run has ended well, and its coordinator was scraped once more: nothing fires, though all targets are down.
        assert server.values('ALERTS{alertstate="firing"}') == []
        until(lambda: server.now("tandem:run_over") == [1.0], RULES_S)
        until(lambda: server.now('ALERTS{alertname=~"Tandem.*(Down|Gone)"}') == [], RULES_S)
        # Of real engines: what is in no stage has one of its own, and no second is in two.
        assert server.stages_share() == pytest.approx(1.0, rel=1e-6)
        assert min(server.values(TOTAL_S.replace("total", "other"))) > 0
        pauses_s = max(server.values("tandem_generation_pause_seconds_sum"))
        assert 0 < pauses_s < max(server.values(TOTAL_S))
        # The last iterations may have come and gone between two scrapes.
        assert 10 < max(server.values("tandem_iteration")) <= 25
