"""When a trainer rank has its weights in memory for a weight sync."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from servicekit.errors import Internal, PeerLost, WrongVersion
from tandem_api.weights.v1 import weights_pb2 as pb
from trainer_service.ranks.publish import Publisher
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, Phase


class Rank:
    """Notes in which phases the weights were there, and how often they came."""

    def __init__(self) -> None:
        self.users, self.came = 0, 0
        self.seen: list[tuple[Phase, bool]] = []
        self.fails: dict[Phase, Exception] = {}
        self.publisher = Publisher(self.run_phase, self.weights)

    @contextmanager
    def weights(self) -> Iterator[Mapping[str, float]]:
        seconds = {"onload": 1.0}
        self.users += 1
        self.came += 1
        yield seconds
        self.users -= 1
        seconds["offload"] = 2.0

    def run_phase(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        self.seen.append((phase, self.users > 0))
        if phase in self.fails:
            raise self.fails[phase]
        return pb.PhaseReport(seconds={"own": 3.0})

    def run(self, *phases: Phase, of: str = "a", version: int = 1) -> list[dict[str, float]]:
        asked = pb.Round(round_id=of, policy_version=version)
        return [dict(self.publisher.run(phase, asked, 1).seconds) for phase in phases]


def test_weights_are_there_from_prepare_to_commit() -> None:
    rank = Rank()
    reports = rank.run(PREPARE, TRANSFER, COMMIT)
    assert rank.seen == [(PREPARE, True), (TRANSFER, True), (COMMIT, True)]
    assert (rank.users, rank.came) == (0, 1)
    assert reports == [{"own": 3.0, "onload": 1.0}, {"own": 3.0}, {"own": 3.0, "offload": 2.0}]
    rank.run(PREPARE, TRANSFER, COMMIT, of="b")
    assert (rank.users, rank.came) == (0, 2)


@pytest.mark.parametrize("error", [PeerLost("rollout-0"), RuntimeError("a bug")])
def test_after_a_failed_transfer_they_stay_until_the_round_is_given_up(error: Exception) -> None:
    """gloo may still read them."""
    rank = Rank()
    rank.fails = {TRANSFER: error}
    rank.run(PREPARE)
    with pytest.raises((PeerLost, Internal)):
        rank.run(TRANSFER)
    assert rank.users == 1
    rank.run(ABORT)
    assert (rank.seen[-1], rank.users) == ((ABORT, True), 0)


def test_a_round_in_the_place_of_another_has_them_too() -> None:
    rank = Rank()
    rank.run(PREPARE)
    rank.run(PREPARE, of="b")
    assert rank.users == 1
    rank.run(ABORT, of="a")
    rank.run(TRANSFER, of="b")
    assert rank.seen[-1] == (TRANSFER, True)
    rank.run(COMMIT, of="b")
    assert rank.users == 0


def test_an_announcement_of_another_version_takes_no_memory() -> None:
    rank: Any = Rank()
    with pytest.raises(WrongVersion):
        rank.run(PREPARE, version=2)
    assert rank.came == 0
