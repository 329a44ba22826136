"""Where the pods of our manifests land, by a scheduler's arithmetic, created in kustomize's order.

Each case is tried with many lots, which decide between equal nodes and the order of pods that are tried again.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_scheduler import FakeNode, FakeScheduler, pods_of
from tests.manifests.kustomize import Manifest, combine, kinds, overlay, pod_template, workloads

LOTS = range(20)
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
MIN_REPLICAS = 12  # of the overlay cluster
ROLLOUTS = pods_of("rollout", 16)


def nodes(gpu_nodes: int, *, tainted: bool = False) -> list[FakeNode]:
    """The hardware that deploy/README.md names: nodes with 8 GPUs, and two for what needs none."""
    large = {"cpu": 192.0, "memory": 2000 * 2.0**30, "nvidia.com/gpu": 8.0}
    small = {"cpu": 32.0, "memory": 128 * 2.0**30}
    taints = [GPU_TAINT] if tainted else []
    found = [FakeNode(name=f"gpu-{index}", allocatable=dict(large), taints=taints) for index in range(gpu_nodes)]
    return [*found, *(FakeNode(name=f"cpu-{index}", allocatable=dict(small)) for index in range(2))]


def apply(scheduler: FakeScheduler, manifests: tuple[Manifest, ...], prefix: str = "") -> None:
    """Make all pods of a run, set after set as kubectl applies them, and place them."""
    for each in workloads(manifests):
        name = each["metadata"]["name"].removeprefix(prefix)
        count = each["spec"].get("replicas", 1)
        if each["kind"] == "JobSet":
            count = each["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
        for pod in pods_of(name, count):
            scheduler.create(f"{prefix}{pod}", pod_template(each))
    scheduler.settle()


def run_on(
    gpu_nodes: int, lot: int, manifests: tuple[Manifest, ...], *, tainted: bool = False, first: int = 1
) -> FakeScheduler:
    """A scheduler with a run that has settled, all of whose pods have a node."""
    classes = {
        each["metadata"]["name"]: (each["value"], each.get("preemptionPolicy", ""))
        for each in kinds(overlay("queues"), "PriorityClass")
    }
    scheduler = FakeScheduler(nodes(gpu_nodes, tainted=tainted), lot, classes)
    apply(scheduler, manifests)
    assert scheduler.pending() == [], lot
    return scheduler


def node_of(scheduler: FakeScheduler, name: str) -> str:
    (pod,) = [each for each in scheduler.pods if each.name == name]
    return pod.node


def without(manifests: tuple[Manifest, ...], *keys: str) -> Iterator[Manifest]:
    """The manifests whose rollouts lack parts of their pods' spec."""
    for each in copy.deepcopy(manifests):
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "rollout":
            for key in keys:
                each["spec"]["template"]["spec"].pop(key)
        yield each


@pytest.fixture(scope="module")
def with_priority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, ...]:
    """The overlay with the component that puts rollouts below the trainer."""
    return combine(tmp_path_factory.mktemp("priority"), "cluster", ["gpu-nodes", "gpu-nodes/priority"])


def test_the_arithmetic_shows_what_a_real_scheduler_did() -> None:
    """What was reported: 16 rollouts, made first, spread 6/5/5, and no node is left whole for the trainer."""
    plain = tuple(without(overlay("cluster"), "affinity"))
    for each in workloads(plain):
        for constraint in pod_template(each)["spec"].get("topologySpreadConstraints", []):
            constraint["maxSkew"] = 1
    for lot in LOTS:
        scheduler = FakeScheduler(nodes(3), lot)
        apply(scheduler, plain)
        assert scheduler.pending() == ["trainer-0"]
        counts = [len([pod for pod in scheduler.on(f"gpu-{index}") if pod in ROLLOUTS]) for index in range(3)]
        assert sorted(counts) == [5, 5, 6]
        # And why the coordinator takes all of them away, not only those above rollout.min_replicas.
        scheduler.delete(*ROLLOUTS[MIN_REPLICAS:])
        scheduler.settle()
        assert scheduler.pending() == ["trainer-0"]
        scheduler.delete(*ROLLOUTS)
        scheduler.settle()
        assert scheduler.pending() == []


@pytest.mark.parametrize("lot", LOTS)
def test_the_hardware_that_the_overlay_names_takes_the_run(lot: int) -> None:
    scheduler = run_on(3, lot, overlay("cluster"))
    # The upgrade of docs/kubernetes.md: the three sets are deleted, and applied again.
    scheduler.delete(*ROLLOUTS, "trainer-0", "coordinator-0", "redis-0")
    apply(scheduler, overlay("cluster"))
    assert scheduler.pending() == []


@pytest.mark.parametrize(
    "components", [["gpu-nodes"], ["gpu-nodes", "jobset-trainer"], ["gpu-nodes", "kueue"]], ids=str
)
def test_components_change_nothing_about_it(components: list[str], tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", components)
    for lot in LOTS:
        run_on(3, lot, manifests, tainted=True)


@pytest.mark.parametrize("lot", LOTS)
def test_a_trainer_that_is_replaced_keeps_its_gpus_from_rollouts_that_wait(lot: int) -> None:
    scheduler = run_on(3, lot, overlay("cluster"))
    lost = node_of(scheduler, "rollout-0")
    scheduler.close(lost)
    scheduler.settle()
    assert len(scheduler.pending()) == 8
    home = node_of(scheduler, "trainer-0")
    scheduler.replace("trainer-0")
    scheduler.settle()
    assert node_of(scheduler, "trainer-0") == home
    scheduler.nodes[lost].closed = False
    scheduler.settle()
    assert scheduler.pending() == []


@pytest.mark.parametrize("lot", LOTS)
def test_a_second_run_finds_whole_nodes(lot: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    second = combine(tmp_path_factory.mktemp("second"), "cluster", ["names"], run="second")
    scheduler = run_on(6, lot, overlay("cluster"))
    apply(scheduler, second, "second-")
    assert scheduler.pending() == []


def test_spread_rollouts_would_leave_a_second_run_no_whole_node(tmp_path: Path) -> None:
    """The scheduler's own constraints spread pods that have none: their absence is no cure."""
    second = combine(tmp_path, "cluster", ["names"], run="second")
    plain = tuple(without(overlay("cluster"), "affinity", "topologySpreadConstraints"))
    scheduler = FakeScheduler(nodes(6), 0)
    apply(scheduler, tuple(sorted(plain, key=lambda each: str(each["metadata"]["name"]) == "rollout")))
    apply(scheduler, second, "second-")
    assert "second-trainer-0" in scheduler.pending()


@pytest.mark.parametrize("lot", LOTS)
def test_a_trainer_whose_node_is_drained_displaces_rollouts_of_a_lower_priority(
    lot: int, with_priority: tuple[Manifest, ...]
) -> None:
    scheduler = run_on(3, lot, with_priority, tainted=True)
    scheduler.create("tenant", _other_tenant())
    scheduler.settle()
    scheduler.close(node_of(scheduler, "trainer-0"))
    scheduler.settle()
    assert node_of(scheduler, "trainer-0")
    assert len(scheduler.pending()) == 8
    assert set(scheduler.pending()) <= set(ROLLOUTS)
    # Nobody else has lost anything: not by the trainer, and not by rollouts, which preempt nobody.
    assert node_of(scheduler, "tenant")


@pytest.mark.parametrize("lot", LOTS)
def test_without_a_class_a_drained_trainer_gets_a_node_when_the_coordinator_takes_the_rollouts_away(lot: int) -> None:
    scheduler = run_on(3, lot, overlay("cluster"))
    scheduler.close(node_of(scheduler, "trainer-0"))
    scheduler.settle()
    assert "trainer-0" in scheduler.pending()
    scheduler.delete(*ROLLOUTS)
    scheduler.settle()
    assert node_of(scheduler, "trainer-0")
    (rollout,) = [each for each in workloads(overlay("cluster")) if each["metadata"]["name"] == "rollout"]
    for name in ROLLOUTS:
        scheduler.create(name, pod_template(rollout))
    scheduler.settle()
    assert len(scheduler.pending()) == 8
    assert set(scheduler.pending()) <= set(ROLLOUTS)


@pytest.mark.parametrize(("name", "allocatable"), [("dev-cpu", (8, 32, 0)), ("single-node-gpu", (64, 512, 4))])
def test_a_run_of_one_node_lands_on_it(name: str, allocatable: tuple[int, int, int]) -> None:
    cpus, gibs, gpus = allocatable
    room = {"cpu": float(cpus), "memory": gibs * 2.0**30} | ({"nvidia.com/gpu": float(gpus)} if gpus else {})
    for lot in LOTS:
        scheduler = FakeScheduler([FakeNode(name="only", allocatable=room)], lot)
        apply(scheduler, overlay(name))
        assert scheduler.pending() == []


def _other_tenant() -> dict[str, Any]:
    requests = {"cpu": "100"}
    spec = {"containers": [{"resources": {"requests": requests}}], "tolerations": [{"operator": "Exists"}]}
    return {"metadata": {"labels": {}}, "spec": spec}
