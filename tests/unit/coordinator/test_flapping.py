"""A replica that is started again and again waits ever longer before it is seeded, and is forgotten once it works."""

import time
from dataclasses import dataclass, field

import pytest

from coordinator.sync import excluded_replicas
from coordinator.sync.excluded_replicas import FORGOTTEN_S, LONGEST_PAUSE_S, WELL_S, LeftOut
from tandem_clients.replica import Replica


@dataclass
class ShownClock:
    """The clock that a test sets, in the place of the module `time`."""

    now_s: float = 1_000.0
    strftime = staticmethod(time.strftime)
    localtime = staticmethod(time.gmtime)

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@dataclass
class Watched:
    """Replicas that come and end, as looks see them."""

    clock: ShownClock
    told: list[str] = field(default_factory=list)
    announced: list[Replica] = field(default_factory=list)
    serving: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left_out = LeftOut(self.told.append)

    def look(self, after_s: float = 1.0) -> list[Replica]:
        self.clock.now_s += after_s
        return self.left_out.look(tuple(self.announced), tuple(self.serving))

    def starts(self, name: str = "rollout-1") -> Replica:
        """A new process of it, beside the others."""
        replica = Replica(name, "127.0.0.1:1")
        self.announced = [*(one for one in self.announced if one.name != name), replica]
        self.serving = [one for one in self.serving if one.name != name]
        self.look()
        return replica

    def serves(self, replica: Replica, seconds: float) -> None:
        self.serving.append(replica)
        self.look()
        for _ in range(int(seconds)):
            self.look()

    def waits_s(self, replica: Replica) -> float:
        """How long it is before it is tried."""
        why = self.left_out._why.get(replica)
        return 0.0 if why is None else max(0.0, why.next_s - self.clock.now_s)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> Watched:
    clock = ShownClock()
    monkeypatch.setattr(excluded_replicas, "time", clock)
    return Watched(clock)


async def test_the_pauses_of_a_replica_that_crashes_again_and_again_double_up_to_a_bound(fleet: Watched) -> None:
    waited = [fleet.waits_s(fleet.starts()) for _ in range(12)]
    assert waited[:6] == [0.0, 0.0, 10.0, 20.0, 40.0, 80.0]
    assert waited[-3:] == [LONGEST_PAUSE_S] * 3


async def test_it_is_told_with_its_reason_and_until_when(fleet: Watched) -> None:
    for _ in range(3):
        replica = fleet.starts()
    expected = (
        "rollout-1 is left out of weight syncs since 00:16:43, until 00:16:53: its last 2 processes ended before they "
        "had served for 60 s"
    )
    assert fleet.told == fleet.left_out.troubles() == [expected]
    assert not fleet.left_out.is_awaited(replica)
    fleet.look(10.0)
    assert fleet.left_out.is_due(replica)
    assert "it is tried again" in fleet.left_out.troubles()[0]
    fleet.left_out.forget([replica])  # it has the weights
    assert fleet.left_out.troubles() == []
    assert len(fleet.told) == 1


@pytest.mark.parametrize("seconds", [WELL_S - 5, WELL_S + 5])
async def test_one_that_has_served_for_long_is_forgiven(fleet: Watched, seconds: float) -> None:
    for _ in range(3):
        replica = fleet.starts()
    fleet.serves(replica, seconds)
    assert (fleet.waits_s(fleet.starts()) == 0.0) == (seconds > WELL_S)


async def test_the_time_of_serving_is_in_one_piece(fleet: Watched) -> None:
    for _ in range(3):
        replica = fleet.starts()
    for _ in range(4):
        fleet.serves(replica, WELL_S / 2)
        fleet.serving.clear()
        fleet.look()
    assert fleet.waits_s(fleet.starts()) == 20.0


async def test_a_process_that_was_asked_to_end_is_no_failure(fleet: Watched) -> None:
    """Scaled out and in again and again, it is started without a pause each time."""
    for _ in range(5):
        replica = fleet.starts()
        fleet.serves(replica, 5.0)
        replica.left = True
    assert fleet.waits_s(fleet.starts()) == 0.0


async def test_one_that_is_lent_and_comes_back_is_the_same_process(fleet: Watched) -> None:
    replica = fleet.starts()
    for _ in range(5):
        fleet.announced, fleet.serving = [], []
        fleet.look()
        fleet.announced = [replica]
        fleet.look()
    assert fleet.waits_s(replica) == 0.0
    assert fleet.told == []


async def test_what_one_replica_does_is_no_fault_of_another(fleet: Watched) -> None:
    good = fleet.starts("rollout-0")
    for _ in range(4):
        fleet.starts("rollout-1")
    assert fleet.waits_s(good) == 0.0
    assert fleet.waits_s(fleet.starts("rollout-2")) == 0.0


async def test_failures_of_its_part_are_counted_on_top(fleet: Watched) -> None:
    for _ in range(3):
        replica = fleet.starts()
    fleet.left_out.note_failure(replica, RuntimeError("out of memory"), 0.1, may_pass=True)
    assert fleet.waits_s(replica) == 20.0
    assert fleet.left_out.troubles()[0].endswith("its part failed 3 times, last with: out of memory")


async def test_a_name_that_nobody_has_had_for_an_hour_is_another_replica(fleet: Watched) -> None:
    for _ in range(4):
        fleet.starts()
    fleet.announced.clear()
    fleet.look(FORGOTTEN_S + 1)
    assert fleet.waits_s(fleet.starts()) == 0.0
