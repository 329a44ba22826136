"""The pure parts of `tandem deploy`: layouts of pods, rooms of nodes, differences of objects."""

from typing import Any

import pytest

from launcher.deploy.check.nodes import NodeRoom, node_problems
from launcher.deploy.overlay.layout import layout_of, misfits
from launcher.deploy.running.diff import _plain, _shaped
from tandem_config.loading import draft_config


def config(**settings: object) -> Any:
    needed = {"model.path": "/models/a", "data.train": "/models/b.jsonl", "reward.kind": "exact_match", "run.name": "a"}
    draft = draft_config(None, [f"{name}={value}" for name, value in {**needed, **settings}.items()])
    assert draft.config is not None
    return draft.config


@pytest.mark.parametrize(
    ("sizes", "gpus", "pods", "ranks"),
    [
        ({"tensor_parallel": 4, "data_parallel": 2}, 8, 1, 8),
        ({"tensor_parallel": 8, "pipeline_parallel": 4}, 8, 4, 8),
        ({"tensor_parallel": 2, "data_parallel": 6}, 8, 2, 6),
        ({"tensor_parallel": 1, "data_parallel": 7}, 4, 7, 1),
        ({"tensor_parallel": 2}, 8, 1, 2),
        ({"tensor_parallel": 2, "data_parallel": 6}, None, 1, 12),
    ],
)
def test_trainer_pods_are_few_and_alike(sizes: dict[str, int], gpus: int | None, pods: int, ranks: int) -> None:
    made = layout_of(config(**{f"trainer.{name}": size for name, size in sizes.items()}), gpus)
    assert (made.trainer_pods, made.ranks_per_host) == (pods, ranks)


def test_gpus_of_a_run_are_counted() -> None:
    given = config(
        **{"trainer.data_parallel": 16, "rollout.replicas": 2, "rollout.tensor_parallel": 16, "rollout.nodes": 2}
    )
    assert layout_of(given, 8).gpus == 16 + 2 * 16


def test_tensor_parallelism_over_several_nodes_is_a_warning() -> None:
    given = config(**{"trainer.tensor_parallel": 8})
    (problem,) = misfits(given, layout_of(given, 4), 4)
    assert (problem.key, problem.severity) == ("trainer.tensor_parallel", "warning")
    assert misfits(given, layout_of(given, 8), 8) == []


def test_one_node_has_to_hold_all_of_it() -> None:
    given = config(**{"trainer.tensor_parallel": 4, "rollout.replicas": 5})
    (problem,) = misfits(given, layout_of(given, 8), 8, one_node=True)
    assert "9 GPUs on one node, but a node has 8" in problem.message
    assert misfits(given, layout_of(given, 16), 16, one_node=True) == []


def node(name: str, *taints: dict[str, str], **amounts: str) -> NodeRoom:
    allocatable = {key.replace("gpu", "nvidia.com/gpu"): amount for key, amount in amounts.items()}
    spec, status = {"taints": list(taints)}, {"allocatable": allocatable}
    return NodeRoom.read({"metadata": {"name": name}, "spec": spec, "status": status})


def workload(pods: int, *tolerations: dict[str, str], **limits: str) -> dict[str, Any]:
    resources = {"limits": {key.replace("gpu", "nvidia.com/gpu"): amount for key, amount in limits.items()}}
    spec = {"containers": [{"name": "a", "resources": resources}], "tolerations": list(tolerations)}
    template = {"metadata": {}, "spec": spec}
    return {"kind": "StatefulSet", "metadata": {"name": "set"}, "spec": {"replicas": pods, "template": template}}


LARGE = {"cpu": "127500m", "memory": "1056000000Ki", "gpu": "8"}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"cpu": "64", "memory": "512Gi", "gpu": "8"}, ""),
        ({"cpu": "128", "gpu": "8"}, "the most cpu of one is 127.5 (large)"),
        ({"memory": "1100Gi"}, "the most memory of one is 1007Gi (large)"),
        ({"gpu": "9"}, "the most nvidia.com/gpu of one is 8 (large)"),
    ],
)
def test_a_pod_that_no_node_can_take(limits: dict[str, str], reason: str) -> None:
    found = list(
        node_problems([workload(1, **limits)], [node("small", cpu="4", memory="8Gi"), node("large", **LARGE)], [])
    )
    assert [problem.severity for problem in found] == (["error"] if reason else [])
    assert all(reason in problem.message for problem in found)


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no", "effect": "NoSchedule"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_toleration_is_compared_as_the_scheduler_does(toleration: dict[str, str], fits: bool) -> None:
    found = list(node_problems([workload(1, toleration, gpu="1")], [node("a", TAINT, **LARGE)], []))
    assert (found == []) == fits


def test_a_preference_of_a_node_keeps_no_pod_out() -> None:
    prefers = {**TAINT, "effect": "PreferNoSchedule"}
    assert list(node_problems([workload(1, gpu="1")], [node("a", prefers, **LARGE)], [])) == []


WANTED = {"spec": {"replicas": 2, "containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}


def test_what_the_server_adds_is_no_difference() -> None:
    container = {"name": "a", "imagePullPolicy": "Always", "env": [{"name": "X", "value": "1"}]}
    live = {"spec": {"replicas": 2, "strategy": {"type": "x"}, "containers": [container]}, "status": {"ready": 1}}
    assert _shaped(live, WANTED, {}) == WANTED


def test_what_was_applied_and_is_no_longer_wanted_is_a_difference() -> None:
    live = {"spec": {**WANTED["spec"], "paused": True}}
    assert _shaped(live, WANTED, {"spec": {"paused": True}}) != WANTED
    assert _shaped(live, WANTED, {}) == WANTED


def test_entries_of_lists_are_compared_by_name() -> None:
    live = {"spec": {"containers": [{"name": "sidecar"}, {"name": "a", "env": [{"name": "X", "value": "2"}]}]}}
    shaped = _shaped(live, WANTED, {})
    assert [each["name"] for each in shaped["spec"]["containers"]] == ["sidecar", "a"]
    assert shaped["spec"]["containers"][1]["env"] == [{"name": "X", "value": "2"}]


def test_how_it_was_applied_is_no_part_of_an_object() -> None:
    notes = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    assert _plain({"metadata": {"name": "a", "annotations": notes}}) == {"metadata": {"name": "a"}}
