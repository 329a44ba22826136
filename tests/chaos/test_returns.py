"""What a publication and a fleet do when services return, when they do not, and when they return from the past."""

import signal
from pathlib import Path

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, TRAINERS, ChaosFleet
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def versions(fleet: ChaosFleet) -> dict[str, tuple[int, int]]:
    """State and version of each replica."""
    found = {name: fleet.status(name) for name in REPLICAS}
    return {name: (status.state, status.policy_version) for name, status in found.items()}


def all_serve(version: int) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(REPLICAS, (pb.REPLICA_STATE_SERVING, version))


def test_a_trainer_that_returns_meanwhile_is_published_in_a_new_epoch(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        fleet.train_step()
        fleet.use(install="in_place", transport="collective", formation_timeout_s=20.0)
        gate = fleet.gate("trainer-0")
        gate.arm("transfer", 4)
        result = fleet.start_coordinator()
        gate.wait_reached(20.0)
        fleet.send_signal("trainer-0", signal.SIGKILL)
        gate.open()
        fleet.start_trainer()
        said = fleet.result_of(result)
        fleet.use(formation_timeout_s=2.0)
        assert said.get("outcomes") == dict.fromkeys(REPLICAS, "COMMITTED"), said
        assert said["attempts"] == 2
        assert versions(fleet) == all_serve(fleet.version)
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3
        fleet.wait_announced()


def test_a_rollout_does_not_go_back_with_a_trainer_from_the_past(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        fleet.train_step()
        assert fleet.publish()["serving"] == list(REPLICAS)
        fleet.version -= 1
        fleet.start_trainer()
        fleet.wait_announced()
        said = fleet.publish()
        assert said["reason"] == "STALE_VERSION"
        assert "versions only grow" in said["error"]
        fleet.version += 1
        assert versions(fleet) == all_serve(fleet.version)
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3
        fleet.start_trainer()
        fleet.wait_announced()
        assert fleet.publish()["serving"] == list(REPLICAS)


@pytest.mark.parametrize("install", ["staged", "in_place"])
def test_generation_goes_on_during_a_staged_transfer_only(fleets: Fleets, install: str) -> None:
    with fleets.whole() as fleet:
        old = versions(fleet)
        fleet.train_step()
        fleet.use(install=install, transport="collective")
        gate = fleet.gate("rollout-1")
        gate.arm("transfer", 4)
        result = fleet.start_coordinator()
        gate.wait_reached(20.0)
        assert [fleet.generates(name) for name in REPLICAS] == [install == "staged"] * 3
        if install == "staged":
            assert versions(fleet) == old
        gate.open()
        assert fleet.result_of(result)["serving"] == list(REPLICAS)
        assert versions(fleet) == all_serve(fleet.version)


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_a_late_joiner_loads_from_disk_what_was_published_while_the_trainer_is_away(
    fleets: Fleets, transport: str
) -> None:
    """Through disk it serves the current version at once; without, it waits for the trainer, and serves nothing."""
    with fleets.whole() as fleet:
        fleet.train_step()
        fleet.use(install="in_place", transport=transport)
        seed = fleet.folder / f"seed-{transport}"
        result = fleet.start_coordinator(seed_when=seed)
        until(Path(f"{result}.first").exists, 20.0)
        for name in (*TRAINERS, "rollout-2"):
            fleet.end(name)
        fleet.start_replica("rollout-2")
        until(lambda: fleet.announced("rollout-2"), 20.0)
        seed.touch()
        said = fleet.result_of(result)
        joiner = {"disk": ["rollout-2"], "collective": []}[transport]
        assert said["serving"] == ["rollout-0", "rollout-1", *joiner]
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3
        if joiner:
            assert versions(fleet) == all_serve(fleet.version)
        fleet.use(transport="collective")
        fleet.start_trainer()
        fleet.wait_announced()
        assert fleet.publish()["serving"] == list(REPLICAS)


@pytest.mark.parametrize("rank", TRAINERS)
def test_a_restarted_trainer_takes_over_replicas_that_are_ahead_of_its_checkpoint(fleets: Fleets, rank: str) -> None:
    """Checkpoint of v; v + 1 is served; a trainer rank dies while v + 2 is on its way. Nobody else is restarted."""
    with fleets.whole() as fleet:
        fleet.use(install="in_place", transport="collective")
        checkpoint, saved = fleet.save(), fleet.version
        fleet.train_step()
        assert fleet.publish()["serving"] == list(REPLICAS)
        epoch = fleet.publish()["epoch"]
        fleet.train_step()
        lose_in_transfer(fleet, rank)
        assert set(versions(fleet).values()) == {(pb.REPLICA_STATE_POISONED, saved + 1)}
        fleet.version = saved
        fleet.start_trainer()
        fleet.wait_announced()
        said = fleet.take_over(checkpoint)
        assert said["serving"] == list(REPLICAS), said
        assert said["epoch"] > epoch
        assert fleet.version == saved + 2
        assert versions(fleet) == all_serve(saved + 2)
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3
        fleet.train_step()
        assert fleet.publish()["serving"] == list(REPLICAS)
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3


def lose_in_transfer(fleet: ChaosFleet, name: str) -> None:
    """A process dies mid-transfer, and the publication with it."""
    assert "error" in fleet.result_of(stop_in_transfer(fleet, name, signal.SIGKILL))


def stop_in_transfer(fleet: ChaosFleet, name: str, how: signal.Signals) -> Path:
    """A process gets a signal at its fifth message. Returns: the file that the publication's result will be in."""
    gate = fleet.gate(name)
    gate.arm("transfer", 4)
    result = fleet.start_coordinator()
    gate.wait_reached(20.0)
    fleet.send_signal(name, how)
    gate.open()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("rank", TRAINERS)
def test_a_trainer_rank_that_wakes_after_it_was_given_up_ends_and_harms_nobody(fleets: Fleets, rank: str) -> None:
    with fleets.whole() as fleet:
        fleet.train_step()
        fleet.use(install="in_place", transport="collective")
        result = stop_in_transfer(fleet, rank, signal.SIGSTOP)
        assert "error" in fleet.result_of(result)
        (other,) = set(TRAINERS) - {rank}
        until(lambda: fleet.has_ended(other), 30.0)  # by itself: it does not wait for the frozen one for ever
        assert not fleet.has_ended(rank)
        fleet.send_signal(rank, signal.SIGCONT)
        until(lambda: fleet.has_ended(rank), 30.0)
        assert set(versions(fleet).values()) == {(pb.REPLICA_STATE_POISONED, fleet.version - 1)}
        fleet.start_trainer()
        fleet.wait_announced()
        assert fleet.publish()["serving"] == list(REPLICAS)
        assert versions(fleet) == all_serve(fleet.version)
        assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3


def test_when_all_replicas_are_lost_the_error_says_so_after_the_deadline(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        for name in REPLICAS:
            fleet.end(name)
        said = fleet.publish()
        assert said["reason"] == "DEADLINE_EXCEEDED"
        assert (
            "waited 2 s for the trainer and 1 replicas (rollout.min_replicas); replicas present: none" in said["error"]
        )
        for name in REPLICAS:
            fleet.start_replica(name)
        fleet.wait_announced()
        assert fleet.publish()["serving"] == list(REPLICAS)


def test_two_replicas_lost_in_one_round_leave_the_third(fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        fleet.train_step()
        gate = fleet.gate("rollout-1")
        gate.arm("transfer", 4)
        result = fleet.start_coordinator()
        gate.wait_reached(20.0)
        fleet.send_signal("rollout-0", signal.SIGKILL)
        fleet.send_signal("rollout-1", signal.SIGKILL)
        gate.open()
        said = fleet.result_of(result)
        assert said.get("serving") == ["rollout-2"], said
        assert fleet.mixture("rollout-2") == ""
        for name in ("rollout-0", "rollout-1"):
            fleet.start_replica(name)
        fleet.wait_announced()
        assert fleet.publish(serving=["rollout-2"])["serving"] == list(REPLICAS)
        assert versions(fleet) == all_serve(fleet.version)
