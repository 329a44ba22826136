"""A fleet that changes while the run goes on: replicas that die, return and join, over real Redis and gRPC."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from coordinator.fleet.services import Services
from coordinator.fleet.view import FleetView
from coordinator.generate.dispatch import Rollouts
from coordinator.shutdown import TrainerLost
from servicekit.environment import ServiceEnvironment
from servicekit.errors import TandemError, Unavailable
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import Order, Prompt, Sampling
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, with_settings
from tests.fakes.fake_fleet import announced_fleet, fake_fleet, served
from tests.fakes.fake_rollout import FakeRollout, GenerateFault
from tests.kit.folders import EOS, encode
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous
from weightsync.round.phases import PREPARE

DEADLINE_S = 20.0
TTL_S = 30.0


def record(name: str, address: str, worker_id: str) -> ServiceRecord:
    return ServiceRecord(role=name.partition("-")[0], name=name, address=address, worker_id=worker_id)


@pytest.fixture
async def announcer(environment: ServiceEnvironment) -> AsyncIterator[list[Registry]]:
    """Two registries to announce services with."""
    registries = [Registry(environment.redis_url, environment.run_id) for _ in range(3)]
    yield registries
    for registry in registries:
        registry.close()


async def test_status_says_why_a_replica_ended_until_it_is_back(announcer: list[Registry]) -> None:
    looker, first, second = announcer
    async with fake_fleet() as services:
        fleet = WatchedFleet(looker, services.trainer)
        view = FleetView(replicas=lambda: 2)
        view.fleet = fleet
        first.announce(record("rollout-0", services.addresses["rollout-0"], "a"), TTL_S)
        second.report_failure("rollout", "rollout-1", "the engine of rollout-1 computed no token for 60 s")
        second.report_failure("trainer", "trainer", "of another kind")
        await fleet.look()
        (told,) = view.troubles()
        assert told.startswith("rollout-1 ended 0 s ago: the engine of rollout-1 computed no token for 60 s")
        second.announce(record("rollout-1", services.addresses["rollout-1"], "b"), TTL_S)
        await fleet.look()
        assert view.troubles() == []
        await fleet.close()


async def test_a_replica_that_returns_is_a_new_one_that_does_not_serve(announcer: list[Registry]) -> None:
    looker, first, second = announcer
    async with fake_fleet() as services:
        fleet = WatchedFleet(looker, services.trainer)
        first.announce(record("rollout-0", services.addresses["rollout-0"], "a"), TTL_S)
        second.announce(record("rollout-1", services.addresses["rollout-1"], "b"), TTL_S)
        found = await fleet.look()
        assert [replica.name for replica in found] == ["rollout-0", "rollout-1"]
        fleet.admit(found)
        assert await fleet.look() == found
        second.withdraw()
        assert await fleet.look() == found[:1]
        assert fleet.serving() == found[:1]
        second.announce(record("rollout-1", services.addresses["rollout-1"], "c"), TTL_S)
        again = await fleet.look()
        assert again[0] is found[0]
        assert again[1] is not found[1]
        assert fleet.serving() == found[:1]
        await fleet.close()


@pytest.mark.parametrize(
    ("how", "left"), [("withdrawn", True), ("failed", False), ("killed", False), ("replaced", False)]
)
async def test_a_process_that_was_asked_to_end_is_told_from_one_that_failed(
    announcer: list[Registry], how: str, left: bool
) -> None:
    looker, first, second = announcer
    async with fake_fleet(num_replicas=1) as services:
        fleet, address = WatchedFleet(looker, services.trainer), services.addresses["rollout-0"]
        first.announce(record("rollout-0", address, "a"), 0.3 if how == "killed" else TTL_S)
        (replica,) = await fleet.look()
        if how == "killed":
            assert first._lease is not None
            first._lease.stop()
            await asyncio.to_thread(until, lambda: looker.list("rollout") == [])
        else:
            first.withdraw()
        if how == "replaced":
            second.announce(record("rollout-0", address, "b"), TTL_S)
        await fleet.look()
        if how == "failed":  # it says so last of all
            first.report_failure("rollout", "rollout-0", "out of memory")
            await fleet.look()
        assert replica.left == left
        await fleet.close()


async def test_a_replica_that_is_announced_no_more_finishes_its_call(announcer: list[Registry]) -> None:
    """Redis may have lost its record while it works."""
    looker, first, _ = announcer
    async with fake_fleet(num_replicas=1) as services:
        (service,) = services.rollout_services
        service.state = weights_pb2.REPLICA_STATE_SERVING
        service.hold.clear()
        fleet = WatchedFleet(looker, services.trainer)
        first.announce(record("rollout-0", services.addresses["rollout-0"], "a"), TTL_S)
        (replica,) = await fleet.look()
        fleet.admit([replica])
        order = Order(
            policy_version=0,
            num_completions=1,
            sampling=Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=(EOS,)),
        )
        prompts = {"g0": Prompt(row=1, token_ids=array("I", encode("10+20=")), answer="30")}
        rollouts = Rollouts(fleet=fleet, max_groups_per_call=1, timeout_s=DEADLINE_S)
        generating = asyncio.create_task(rollouts.generate(prompts, order))
        await asyncio.wait_for(service.asked.wait(), DEADLINE_S)
        first.withdraw()
        assert await fleet.look() == fleet.serving() == ()
        service.hold.set()
        generation = await generating
        assert (len(generation.groups), generation.retried_calls) == (1, 0)
        await fleet.look()
        with pytest.raises(Unavailable, match="rollout-0: our connection to it was closed"):
            await replica.status()


async def test_a_call_whose_connection_another_look_closes_fails_and_is_not_cancelled() -> None:
    async with fake_fleet(num_replicas=1) as services:
        (service,), (replica,) = services.rollout_services, services.replicas
        service.stuck = {PREPARE}
        round_ = weights_pb2.Round(round_id="r", formation_timeout_s=DEADLINE_S, transfer_timeout_s=DEADLINE_S)
        call = asyncio.create_task(replica.rounds.run_phase(PREPARE, round_))
        await asyncio.to_thread(until, lambda: service.phase_calls)
        await replica.close()
        with pytest.raises(Unavailable, match="rollout-0: our connection to it was closed"):
            await asyncio.wait_for(call, DEADLINE_S)
        service.moves.set()
        again = asyncio.create_task(Replica("rollout-0", services.addresses["rollout-0"]).status())
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again


async def test_the_trainers_client_follows_a_trainer_that_moves(announcer: list[Registry]) -> None:
    looker, first, _ = announcer
    async with fake_fleet() as old, fake_fleet() as new:
        new.trainer_service.policy_version = 9
        fleet = WatchedFleet(looker, old.trainer)
        first.announce(record("trainer", old.addresses["trainer"], "a"), TTL_S)
        await fleet.look()
        assert (await old.trainer.status()).policy_version == 0
        first.withdraw()
        first.announce(record("trainer", new.addresses["trainer"], "b"), TTL_S)
        await fleet.look()
        assert (await old.trainer.status()).policy_version == 9


async def test_a_restarted_coordinator_waits_until_the_record_of_a_killed_trainer_has_run_out(
    announcer: list[Registry],
) -> None:
    looker, first, second = announcer
    async with fake_fleet() as old, fake_fleet() as new:
        await old.servers["trainer"].drain(0.0)
        first.announce(record("trainer", old.addresses["trainer"], "a"), TTL_S)
        services = Services(trainer=old.trainer, fleet=WatchedFleet(looker, old.trainer))
        with pytest.raises(Unavailable, match="trainer"):
            await services.wait_for_trainer(0.2)
        waiting = asyncio.create_task(services.wait_for_trainer(DEADLINE_S))
        first.withdraw()
        second.announce(record("trainer", new.addresses["trainer"], "b"), TTL_S)
        await waiting
        assert await services.trainer_answers()


async def test_another_program_at_the_address_of_a_killed_trainer_is_not_the_trainer(
    announcer: list[Registry],
) -> None:
    looker, first, second = announcer
    async with fake_fleet() as old, fake_fleet() as new:
        first.announce(record("trainer", old.addresses["rollout-0"], "a"), TTL_S)  # which serves no trainer
        services = Services(trainer=old.trainer, fleet=WatchedFleet(looker, old.trainer), lease_ttl_s=1.0)
        with pytest.raises(TandemError, match="UNIMPLEMENTED"):  # one that is announced for longer will not change
            await services.wait_for_trainer(DEADLINE_S)
        patient = replace(services, lease_ttl_s=DEADLINE_S)
        waiting = asyncio.create_task(patient.wait_for_trainer(DEADLINE_S))
        first.withdraw()
        waiting_still = asyncio.create_task(services.wait_for_trainer(DEADLINE_S))
        await asyncio.wait([waiting_still], timeout=2.0)  # none is announced: the next one is being started
        assert not waiting_still.done()
        second.announce(record("trainer", new.addresses["trainer"], "b"), TTL_S)
        await asyncio.gather(waiting, waiting_still)
        assert await services.trainer_answers()


async def test_a_frozen_trainer_is_lost_and_not_waited_for(announcer: list[Registry]) -> None:
    """Its host accepts connections in its place, so that a new one fails before a status call is too late."""
    frozen = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    host, port = frozen.sockets[0].getsockname()
    trainer = Trainer(f"{host}:{port}")
    services = Services(trainer=trainer, fleet=WatchedFleet(announcer[0], trainer), startup_timeout_s=DEADLINE_S)
    with pytest.raises(Unavailable):
        await trainer.status(timeout_s=DEADLINE_S)
    with pytest.raises(TrainerLost, match="stream; the trainer does not answer"):
        await asyncio.wait_for(services.until_back(Unavailable("stream")), DEADLINE_S)
    frozen.close()
    with pytest.raises(TrainerLost, match=r"waited 0\.1 s for another"):  # it is dead, and may be started again
        await replace(services, startup_timeout_s=0.1).until_back(Unavailable("stream"))
    await trainer.close()


async def test_a_trainer_that_is_announced_again_while_it_is_asked_is_not_frozen(
    announcer: list[Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_fleet() as old, fake_fleet() as new:
        real, address = old.trainer.status, new.addresses["trainer"]

        async def status(**options: Any) -> Any:
            monkeypatch.setattr(old.trainer, "status", real)
            await old.trainer.move_to(address)
            raise Unavailable("our connection to it was closed: it is lost")

        monkeypatch.setattr(old.trainer, "status", status)
        services = Services(trainer=old.trainer, fleet=WatchedFleet(announcer[0], old.trainer), startup_timeout_s=5.0)
        await services.until_back(Unavailable("stream"))
        assert await services.trainer_answers()


async def test_a_run_goes_on_without_a_replica_and_takes_it_back(
    config: RunConfig, environment: ServiceEnvironment, announcer: list[Registry]
) -> None:
    config = with_settings(config, run={"iterations": 12}, sync={"probe_timeout_s": 1.0, "lease_ttl_s": 1.0})
    async with announced_fleet(environment.redis_url, environment.run_id) as services:
        run = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        await asyncio.wait_for(services.rollout_services[1].asked.wait(), DEADLINE_S)
        await services.servers["rollout-1"].drain(0.0)  # killed: its record outlives it
        lost = dict(services.addresses)["rollout-1"]
        back = FakeRollout(name="rollout-1")
        async with served(back) as (_, address):
            assert address != lost
            services.registries["rollout-1"].withdraw()
            announcer[0].announce(record("rollout-1", address, "another process"), TTL_S)
            await asyncio.wait_for(back.asked.wait(), DEADLINE_S)
            assert back.state == weights_pb2.REPLICA_STATE_SERVING  # seeded before it was asked for anything
            assert await asyncio.wait_for(run, DEADLINE_S) == 0
    assert [row["iteration"] for row in rows(environment)] == list(range(1, 13))


async def test_a_run_outlives_all_of_its_replicas(
    config: RunConfig, environment: ServiceEnvironment, announcer: list[Registry]
) -> None:
    """In the middle of an iteration: groups that were finished are kept, those that come do the rest."""
    # The fleet is looked at once a second; a probe as short as that could end the run before the next look.
    config = with_settings(config, run={"iterations": 4}, sync={"probe_timeout_s": 5.0, "lease_ttl_s": 1.0})
    back = FakeRollout(name="rollout-1")
    told = REGISTRY.get_sample_value("tandem_warnings_total", {"kind": "replicas"}) or 0.0
    async with announced_fleet(environment.redis_url, environment.run_id) as services, served(back) as (_, address):
        for service in services.rollout_services:
            # The first call is the evaluation; of the first iteration's groups, each finishes two and fails then.
            killed = GenerateFault(2, Unavailable("killed"))
            service.faults.extend([None, killed, *[GenerateFault(0, Unavailable("killed"))] * 9])
        run = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        await asyncio.to_thread(until, lambda: all(len(each.requests) == 3 for each in services.rollout_services))
        for name in ("rollout-0", "rollout-1"):
            services.registries[name].withdraw()
        announcer[0].announce(record("rollout-1", address, "another process"), TTL_S)
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
        assert [len(request.groups) for request in back.requests[:2]] == [
            4,
            8,
        ]  # of the first eight, four were finished
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4]
    assert rows(environment)[0]["retried_calls"] == 4
    # That nobody was left, and who has come.
    assert REGISTRY.get_sample_value("tandem_warnings_total", {"kind": "replicas"}) == told + 2


async def test_a_second_coordinator_is_refused_by_name_and_leaves_the_first_ones_files_alone(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_settings(config, sync={"lease_ttl_s": 0.2})
    first = CoordinatorLease(Rendezvous(environment.redis_url, f"tandem:{environment.run_id}"), TTL_S)
    first.claim(0.0)
    async with announced_fleet(environment.redis_url, environment.run_id) as services:
        code = await asyncio.wait_for(conduct(config, environment, resume=False, stop=asyncio.Event()), DEADLINE_S)
        assert code == 1
        assert all(service.sync.seen == [] for service in services.rollout_services)
    assert f"slot coordinator of tandem:t is held by worker {first.worker_id}" in caplog.text
    assert [path.name for path in environment.run_dir.iterdir()] == ["run.json"]
    first.close()
