"""Who takes part in a round: those that read the coordinator's configuration; a run that is to end waits for none."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.sync.participants import RollCall
from servicekit.errors import ConfigurationSkew, DeadlineExceeded, Unavailable
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.replica import Replica
from tests.fakes.fake_fleet import StaticFleet
from tests.fakes.fake_sync import FakeGroup
from weightsync.layouts.layout import Parallel

LONG_S = 600.0


class Service(Replica):
    """A replica, or a trainer, that answers with `answer`, or is lost; `asked` is set by the first question."""

    def __init__(self, name: str, answer: Any = None) -> None:  # without a channel
        self.name, self.answer, self.asked = name, answer, asyncio.Event()

    async def status(self, *, timeout_s: float = 1.0) -> Any:
        self.asked.set()
        if self.answer is None:
            raise Unavailable(f"{self.name}: connection refused")
        return self.answer


class Agreement:
    """The coordinator's settings, and what is known of others'."""

    settings_digest = "ours"

    def explain_settings(self, digest: str) -> str:
        return f"grpo.temperature: 0.7 here, 1.0 there ({digest})"


def present(name: str, settings: str = "") -> Service:
    sizes = Parallel(tensor=1).to_proto()
    if name == "trainer":
        return Service(name, trainer_pb2.GetStatusResponse(world_size=1, settings_digest=settings))
    return Service(name, rollout_pb2.GetStatusResponse(parallel=sizes, settings_digest=settings))


def roll_call(
    trainer: Service, replicas: Sequence[Service], group: FakeGroup, ending: asyncio.Event, min_replicas: int = 1
) -> RollCall:
    sender: Any = trainer
    return RollCall(
        trainer=sender,
        fleet=StaticFleet(replicas),
        group=group,
        min_replicas=min_replicas,
        ending=ending,
        agreement=Agreement(),
        probe_timeout_s=LONG_S,
        slots_timeout_s=LONG_S,
        timeout_s=LONG_S,
    )


@pytest.mark.parametrize("lost", ["trainer", "rollout-0", "rollout-0/0"])
async def test_a_run_that_is_to_end_does_not_wait_for_a_service_that_is_lost(lost: str) -> None:
    trainer, replica = (Service(name) if name == lost else present(name) for name in ("trainer", "rollout-0"))
    ending = asyncio.Event()
    calling = asyncio.create_task(
        roll_call(trainer, [replica], FakeGroup(empty=(lost,)), ending).call(0, rejoin_timeout_s=LONG_S)
    )
    await replica.asked.wait()
    await asyncio.sleep(0.2)
    assert not calling.done()
    ending.set()
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"{lost}"):
        await asyncio.wait_for(calling, 3.0)
    assert time.monotonic() - begun_s < 2.0


async def test_a_run_that_is_to_end_still_finishes_a_round_that_can_be() -> None:
    ending = asyncio.Event()
    ending.set()
    found = await roll_call(present("trainer"), [present("rollout-0")], FakeGroup(), ending).call(0)
    assert [replica.name for replica in found.replicas] == ["rollout-0"]


async def test_a_trainer_with_another_configuration_is_refused_by_name() -> None:
    calling = roll_call(present("trainer", "other"), [present("rollout-0", "ours")], FakeGroup(), asyncio.Event())
    told = r"^trainer: it has read another configuration: grpo\.temperature: 0\.7 here, 1\.0 there \(other\): restart"
    for refused in (calling.call(0), calling.check_configuration()):
        with pytest.raises(ConfigurationSkew, match=told):
            await asyncio.wait_for(refused, 10.0)


async def test_a_replica_with_another_configuration_is_left_out_as_long_as_enough_are_left() -> None:
    trainer, replicas = present("trainer", "ours"), [present("rollout-0", "ours"), present("rollout-1", "other")]
    found = await roll_call(trainer, replicas, FakeGroup(), asyncio.Event()).call(0)
    assert [replica.name for replica in found.replicas] == ["rollout-0"]
    with pytest.raises(ConfigurationSkew, match=r"^rollout-1: it has read another configuration: grpo\.temperature"):
        await roll_call(trainer, replicas, FakeGroup(), asyncio.Event(), min_replicas=2).call(0)


async def test_a_replica_that_does_not_say_what_it_has_read_takes_part() -> None:
    found = await roll_call(present("trainer"), [present("rollout-0")], FakeGroup(), asyncio.Event()).call(0)
    assert [replica.name for replica in found.replicas] == ["rollout-0"]
