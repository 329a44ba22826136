"""What a run that starts waits for, by name, until it is announced; and for how long."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.fleet import arrivals
from coordinator.fleet.arrivals import LeaseOutlook, missing, note_arrivals, wait_for_enough
from coordinator.fleet.services import _Names
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import DeadlineExceeded, Unavailable
from tandem_config.schema import RunConfig

CONFIG = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rollout": {"replicas": 3}}


def config(**fleet: Any) -> RunConfig:
    return RunConfig.model_validate({**CONFIG, "fleet": fleet})


class FakeRegistry:
    """Announces one more service each time that it is asked for trainers, up to `most`; first it does not answer."""

    def __init__(self, asked: int = -1, most: int = 4) -> None:
        self.asked, self.most = asked, most

    def failures(self) -> list[str]:
        return ["rollout-0 failed: no GPU"]

    def list(self, role: str) -> list[SimpleNamespace]:
        self.asked += role == "trainer"
        if self.asked == 0:
            raise Unavailable("no Redis")
        names = ["rollout-2", "trainer", "rollout-0", "rollout-1"][: min(self.asked, self.most)]
        return [SimpleNamespace(name=name) for name in names if name.startswith(role)]


async def test_services_are_noted_until_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_LOOK_S", 0.0)
    observed, seen = FleetRecorder(), list[list[str]]()

    def starting() -> bool:
        seen.append(list(observed.awaited))
        return True

    registry: Any = FakeRegistry()
    await asyncio.wait_for(note_arrivals(config(), registry, observed, starting, lambda: 3), 5)
    assert seen[2:] == [["trainer", "rollout-0", "rollout-1"], ["rollout-0", "rollout-1"], ["rollout-1"]]
    assert (observed.awaited, set(observed.arrived)) == ([], {"trainer", "rollout-0", "rollout-1", "rollout-2"})


async def test_a_run_that_has_started_without_some_waits_for_none() -> None:
    observed, registry = FleetRecorder(), FakeRegistry()
    observed.awaited = ["rollout-1"]
    await note_arrivals(config(), registry, observed, lambda: False, lambda: 3)  # type: ignore[arg-type]
    assert observed.awaited == []


def test_replicas_of_a_cluster_are_counted() -> None:
    cluster = config(kind="kubernetes")
    assert missing(cluster, 3, 0, ["r-x"]) == ["trainer", "2 more replicas"]
    assert missing(cluster, 3, 1, ["a", "b", "c", "d"]) == []


async def test_a_start_waits_for_as_many_replicas_as_there_should_be_now() -> None:
    settings, registry = waits(1, 600.0), FakeRegistry(0, 2)
    wanted = iter([3, 3, 1])
    found = wait_for_enough(settings, registry, LeaseOutlook(settings, registry), lambda: next(wanted))  # type: ignore[arg-type]
    assert (await asyncio.wait_for(found, 5)).name == "trainer"
    names = _Names(lambda: 2)
    assert (list(names), len(names), "rollout-1" in names) == (["rollout-0", "rollout-1"], 2, True)


def waits(min_replicas: int, timeout_s: float) -> RunConfig:
    rollout, run = {"replicas": 3, "min_replicas": min_replicas}, {"startup_timeout_s": timeout_s}
    return RunConfig.model_validate({**CONFIG, "rollout": rollout, "run": run})


@pytest.mark.parametrize(
    ("most", "timeout_s", "others_s"),
    [(4, 600.0, math.inf), (2, 600.0, 0.5), (2, 600.0, 0.0), (2, 0.3, math.inf)],
    ids=["all are announced", "a while after enough", "enough", "at the latest at the end of the time to start"],
)
async def test_enough_services_are_waited_for(most: int, timeout_s: float, others_s: float) -> None:
    settings, registry = waits(1, timeout_s), FakeRegistry(0, most)
    outlook = LeaseOutlook(settings, registry)  # type: ignore[arg-type]
    waiting = wait_for_enough(settings, registry, outlook, lambda: 3, others_s=others_s)  # type: ignore[arg-type]
    trainer = await asyncio.wait_for(waiting, 5)
    assert (trainer.name, registry.asked >= most) == ("trainer", True)


async def test_too_few_services_are_named_with_the_failures_of_others() -> None:
    settings, registry = waits(2, 0.3), FakeRegistry(0, 2)
    said = r"waited 0.3 s for the trainer and 2 replicas .*; announced: trainer, rollout-2; rollout-0 failed: no GPU"
    with pytest.raises(DeadlineExceeded, match=said):
        await wait_for_enough(settings, registry, LeaseOutlook(settings, registry), lambda: 3)  # type: ignore[arg-type]
