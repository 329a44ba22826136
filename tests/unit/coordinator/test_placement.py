"""Room for the trainer: when the coordinator takes the rollouts away, and that it brings them back."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook
from coordinator.fleet.kubernetes.placement import AFTER_S, PLACEMENT_FILE, RoomForTrainer
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.watch.events import EventLog
from servicekit.errors import PermissionDenied

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
        self.refused = False
        self.asked: list[int] = []
        self.trainers(a_pod("trainer-0", trouble=FULL))

    def trainers(self, *pods: Pod) -> None:
        held = [a_pod(f"rollout-{index}", node=f"gpu-{index % 3}") for index in range(self.size)]
        self.pods = (*held, *pods)

    def replicas_of(self, pod_set: PodSet) -> tuple[int, str]:
        return self.size, "1"

    def scale(self, pod_set: PodSet, replicas: int) -> int:
        if self.refused:
            raise PermissionDenied("patch statefulsets/scale: refused")
        self.asked.append(replicas)
        before, self.size = self.size, replicas
        return before

    def create_event(self, body: Any) -> None:
        """Events are not looked at here."""

    def coordinator(self, wanted: int | None = None) -> Callable[[float], None]:
        """Another coordinator. Returns: lets it look after so many seconds."""
        api: Any = self
        rollouts = PodSet(kind="StatefulSet", name="rollout")
        troubles = Troubles(EventLog())
        placement = RoomForTrainer(api, api, troubles, rollouts, self.folder, wanted=wanted, clock=lambda: self.now_s)

        def look(after_s: float) -> None:
            self.now_s += after_s
            placement.look()

        return look


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def emptied(scene: Scene, wanted: int | None = None) -> Callable[[float], None]:
    look = scene.coordinator(wanted)
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


@pytest.mark.parametrize("wanted", [None, 20])
def test_a_coordinator_that_is_started_meanwhile_brings_them_back(scene: Scene, wanted: int | None) -> None:
    emptied(scene)
    look = scene.coordinator(wanted)
    look(AFTER_S)
    assert scene.asked == [0]
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    look(1.0)
    assert scene.asked == [0, wanted or 16]


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


def test_what_is_refused_is_an_error_and_is_tried_again(scene: Scene) -> None:
    look = scene.coordinator()
    look(0.0)
    scene.refused = True
    with pytest.raises(PermissionDenied):
        look(AFTER_S)
    assert not (scene.folder / PLACEMENT_FILE).exists()
    scene.refused = False
    look(1.0)
    assert scene.asked == []  # not before it has waited again
    look(AFTER_S)
    assert scene.asked == [0]


def test_a_damaged_note_is_none(scene: Scene) -> None:
    (scene.folder / PLACEMENT_FILE).write_text("{")
    scene.size = 0
    scene.trainers(a_pod("trainer-0", node="gpu-0"))
    scene.coordinator()(1.0)
    assert scene.asked == []
