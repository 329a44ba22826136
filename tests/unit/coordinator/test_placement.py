"""Room for the trainer: when the coordinator takes the rollouts away, and that it brings them back."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook
from coordinator.fleet.kubernetes.placement import AFTER_S, RoomForTrainer
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.watch.events import EventLog
from servicekit.errors import Fenced, PermissionDenied, Unavailable
from tandem_files.leader import PLACEMENT_FILE

FULL = "unschedulable: 0/5 nodes are available: 2 node(s) had untolerated taint(s), 3 Insufficient nvidia.com/gpu."


def a_pod(name: str, *, node: str = "", trouble: str = "") -> Pod:
    return Pod(
        name=name,
        uid=name,
        component=name.rpartition("-")[0],
        leaving=False,
        ready=bool(node),
        restarts=0,
        outlook=PodOutlook.UP if node else PodOutlook.COMING,
        trouble=trouble,
        node=node,
    )


class Scene:
    """A rollout set of 16, its pods, a trainer, and coordinators one after another; a FAKE API without controllers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size, self.now_s, self.namespace = folder, 16, 0.0, "tandem"
        self.pods: tuple[Pod, ...] = ()
        self.is_current = True
        self.refused: Exception | None = None
        self.asked: list[int] = []
        self.trainers(a_pod("trainer-0", trouble=FULL))

    def trainers(self, *pods: Pod) -> None:
        held = [a_pod(f"rollout-{index}", node=f"gpu-{index % 3}") for index in range(self.size)]
        self.pods = (*held, *pods)

    def replicas_of(self, pod_set: PodSet) -> tuple[int, str]:
        return self.size, "1"

    def scale(self, pod_set: PodSet, replicas: int) -> int:
        if self.refused is not None:
            raise self.refused
        self.asked.append(replicas)
        before, self.size = self.size, replicas
        return before

    def before_change(self) -> None:
        """No other coordinator leads."""

    def create_event(self, body: Any) -> None:
        """Events are not looked at here."""

    def placement(self) -> RoomForTrainer:
        """Another coordinator's."""
        api: Any = self
        rollouts = PodSet(kind="StatefulSet", name="rollout")
        troubles = Troubles(EventLog())
        room = RoomForTrainer(api, api, troubles, rollouts, self.folder, clock=lambda: self.now_s)
        room.recall()
        return room

    def looks(self, placement: RoomForTrainer) -> Callable[[float], None]:
        """Lets a coordinator look after so many seconds."""

        def look(after_s: float) -> None:
            self.now_s += after_s
            placement.look()

        return look

    def coordinator(self) -> Callable[[float], None]:
        """Another coordinator. Returns: lets it look after so many seconds."""
        return self.looks(self.placement())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def emptied(scene: Scene) -> Callable[[float], None]:
    look = scene.coordinator()
    look(0.0)
    look(AFTER_S)
    assert scene.size == 0
    scene.trainers(a_pod("trainer-0", trouble=FULL))
    return look


def test_rollouts_go_until_the_trainer_has_its_nodes_and_come_back_as_many_as_they_were(scene: Scene) -> None:
    look = scene.coordinator()
    look(0.0)
    look(AFTER_S - 1.0)
    assert scene.asked == []  # a preemption may be making room
    look(1.0)
    assert scene.asked == [0]
    # One of two hosts is not enough.
    scene.trainers(a_pod("trainer-0", node="gpu-0"), a_pod("trainer-1", trouble=FULL))
    look(AFTER_S)
    assert scene.asked == [0]
    scene.trainers(a_pod("trainer-0", node="gpu-0"), a_pod("trainer-1", node="gpu-1"))
    look(1.0)
    assert scene.asked == [0, 16]
    assert not (scene.folder / PLACEMENT_FILE).exists()
    look(AFTER_S)
    look(AFTER_S)
    assert scene.asked == [0, 16]


def test_a_coordinator_that_is_started_meanwhile_brings_back_as_many_as_there_were(scene: Scene) -> None:
    emptied(scene)
    look = scene.coordinator()
    look(AFTER_S)
    assert scene.asked == [0]
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    look(1.0)
    assert scene.asked == [0, 16]


def test_a_coordinator_that_was_replaced_leaves_the_size_that_its_successor_has_noted(scene: Scene) -> None:
    """Frozen after it has seen that the set is not at 0, while the successor has made room once more."""
    look = emptied(scene)
    scene.size = 5
    noted = (scene.folder / PLACEMENT_FILE).read_text()

    def replaced() -> None:
        raise Fenced("coordinator b has taken over the run")

    scene.before_change = replaced  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        look(1.0)
    assert (scene.folder / PLACEMENT_FILE).read_text() == noted


def test_a_set_that_somebody_else_scales_is_theirs(scene: Scene) -> None:
    look = emptied(scene)
    scene.size = 5
    scene.trainers(a_pod("trainer-0", trouble=FULL))
    for _ in range(3):
        look(AFTER_S)
    assert (scene.size, scene.asked) == (5, [0])
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    look(1.0)
    assert (scene.size, scene.asked) == (5, [0])
    # From then on it may be taken again.
    scene.trainers(a_pod("trainer-0", trouble=FULL))
    look(0.0)
    look(AFTER_S)
    assert scene.asked == [0, 0]


def test_a_set_that_was_applied_anew_after_a_crash_is_theirs_too(scene: Scene) -> None:
    emptied(scene)
    scene.size = 16
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    scene.coordinator()(1.0)
    assert scene.asked == [0]
    assert not (scene.folder / PLACEMENT_FILE).exists()


@pytest.mark.parametrize(
    "trainer",
    [
        a_pod("trainer-0", trouble="unschedulable: 0/5 nodes are available: 5 node(s) had untolerated taint(s)."),
        a_pod("trainer-0", trouble="unschedulable: 0/5 nodes are available: pod has unbound PersistentVolumeClaims."),
        a_pod("trainer-0", node="gpu-0", trouble="container trainer: CrashLoopBackOff: Insufficient memory"),
        dataclasses.replace(a_pod("trainer-0", trouble=FULL), leaving=True),
        a_pod("trainer-0"),
    ],
    ids=["taint", "claim", "crashes", "leaves", "new"],
)
def test_what_fewer_rollouts_would_not_cure_leaves_them(scene: Scene, trainer: Pod) -> None:
    scene.trainers(trainer)
    look = scene.coordinator()
    for _ in range(3):
        look(AFTER_S)
    assert scene.asked == []


def test_rollouts_without_nodes_hold_nothing(scene: Scene) -> None:
    scene.pods = (a_pod("rollout-0", trouble=FULL), a_pod("trainer-0", trouble=FULL))
    look = scene.coordinator()
    for _ in range(3):
        look(AFTER_S)
    assert scene.asked == []


def test_an_api_that_is_away_decides_nothing(scene: Scene) -> None:
    look = scene.coordinator()
    look(0.0)
    scene.is_current = False
    look(AFTER_S)
    assert scene.asked == []


@pytest.mark.parametrize("error", [PermissionDenied("refused"), Unavailable("no answer")], ids=["refused", "lost"])
def test_what_fails_is_an_error_and_is_tried_again(scene: Scene, error: Exception) -> None:
    """A set that was never at 0 has not been scaled by another writer, whatever the note says."""
    look = scene.coordinator()
    look(0.0)
    scene.refused = error
    with pytest.raises(type(error)):
        look(AFTER_S)
    scene.refused = None
    look(1.0)
    assert scene.asked == []  # not before it has waited again
    assert not (scene.folder / PLACEMENT_FILE).exists()
    look(AFTER_S)
    assert scene.asked == [0]


def test_a_coordinator_that_died_before_it_scaled_has_a_successor_that_does(scene: Scene) -> None:
    (scene.folder / PLACEMENT_FILE).write_text('{"replicas": 16}')
    look = scene.coordinator()
    look(0.0)
    look(AFTER_S)
    assert scene.asked == [0]


def test_an_answer_that_was_lost_after_the_set_was_scaled_brings_the_rollouts_back(scene: Scene) -> None:
    look = scene.coordinator()
    look(0.0)
    scene.refused = Unavailable("no answer")
    with pytest.raises(Unavailable):
        look(AFTER_S)
    scene.size, scene.refused = 0, None
    scene.trainers(a_pod("trainer-0", trouble=FULL))
    look(1.0)
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    look(1.0)
    assert scene.asked == [16]


def test_a_trainer_pod_that_leaves_holds_no_place_for_its_successor(scene: Scene) -> None:
    look = emptied(scene)
    one = a_pod("trainer-0", node="gpu-0")
    leaves = dataclasses.replace(a_pod("trainer-1", node="gpu-1"), leaving=True, place="trainer/trainer-1")
    scene.trainers(one, leaves)
    look(1.0)
    assert scene.asked == [0]
    # A Job keeps its failed pods, under other names.
    scene.trainers(one, leaves, dataclasses.replace(leaves, name="trainer-1-x", leaving=False))
    look(1.0)
    assert scene.asked == [0, 16]


def test_rollouts_that_cannot_come_back_are_waited_for_no_longer_than_others(scene: Scene) -> None:
    emptied(scene)
    placement = scene.placement()
    look = scene.looks(placement)
    look(1.0)
    assert placement.is_waiting
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    scene.refused = PermissionDenied("refused")
    with pytest.raises(PermissionDenied):
        look(1.0)
    assert not placement.is_waiting
    scene.refused = None
    look(1.0)
    assert scene.asked == [0, 16]


def test_a_damaged_note_is_none(scene: Scene) -> None:
    (scene.folder / PLACEMENT_FILE).write_text("{")
    scene.size = 0
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    scene.coordinator()(1.0)
    assert scene.asked == []
