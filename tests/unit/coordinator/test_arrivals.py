"""What a run that starts waits for, by name, until it is announced."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.fleet import arrivals
from coordinator.fleet.arrivals import missing, note_arrivals
from coordinator.watch.observed import Observed
from servicekit.errors import Unavailable
from tandem_config.schema import RunConfig

CONFIG = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": {"replicas": 3}}


def config(**fleet: Any) -> RunConfig:
    return RunConfig.model_validate({**CONFIG, "fleet": fleet})


class FakeRegistry:
    """Announces one more service each time that it is asked for trainers; first it does not answer."""

    def __init__(self) -> None:
        self.asked = -1

    def list(self, role: str) -> list[SimpleNamespace]:
        self.asked += role == "trainer"
        if self.asked == 0:
            raise Unavailable("no Redis")
        names = ["rollout-2", "trainer", "rollout-0", "rollout-1"][: self.asked]
        return [SimpleNamespace(name=name) for name in names if name.startswith(role)]


async def test_services_are_noted_until_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_LOOK_S", 0.0)
    observed, seen = Observed(), list[list[str]]()

    def starting() -> bool:
        seen.append(list(observed.awaited))
        return True

    registry: Any = FakeRegistry()
    await asyncio.wait_for(note_arrivals(config(), registry, observed, starting), 5)
    assert seen[2:] == [["trainer", "rollout-0", "rollout-1"], ["rollout-0", "rollout-1"], ["rollout-1"]]
    assert (observed.awaited, set(observed.arrived)) == ([], {"trainer", "rollout-0", "rollout-1", "rollout-2"})


async def test_a_run_that_has_started_without_some_waits_for_none() -> None:
    observed, registry = Observed(), FakeRegistry()
    observed.awaited = ["rollout-1"]
    await note_arrivals(config(), registry, observed, lambda: False)  # type: ignore[arg-type]
    assert observed.awaited == []


def test_replicas_of_a_cluster_are_counted() -> None:
    cluster = config(kind="kubernetes")
    assert missing(cluster, 0, ["r-x"]) == ["trainer", "2 more replicas"]
    assert missing(cluster, 1, ["a", "b", "c", "d"]) == []
