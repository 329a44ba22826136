"""Objects that the tests put into the fake cluster: pods as their set would make them."""

from typing import Any

import yaml

from tests.house.repository import REPO

NAMESPACE = "tandem"


def role_rules() -> list[dict[str, Any]]:
    """What the coordinator may do, as deploy/ has it, with the components lws-rollout and jobset-trainer."""
    found = yaml.safe_load_all((REPO / "deploy" / "base" / "coordinator-rbac.yaml").read_text())
    (rules,) = [each["rules"] for each in found if each["kind"] == "Role"]
    patches = ("lws-rollout/scale-permission.yaml", "jobset-trainer/release-permission.yaml")
    for patch in patches:
        operations = yaml.safe_load((REPO / "deploy" / "components" / patch).read_text())
        rules += [operation["value"] for operation in operations if operation["op"] == "replace"]
    return list(rules)


def pod(
    name: str,
    *,
    component: str = "rollout",
    run_id: str = "t",
    ready: bool = True,
    phase: str = "Running",
    node: str = "",
    **status: Any,
) -> dict[str, Any]:
    """A pod, with the labels by which the coordinator finds it."""
    labels = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/component": component, "tandem.run/id": run_id}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    spec = {"containers": [{"name": component, "image": f"tandem-{component}:test"}]} | (
        {"nodeName": node} if node else {}
    )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": spec,
        "status": {"phase": phase, "conditions": conditions, **status},
    }


def gated(name: str, component: str = "trainer", run_id: str = "t") -> dict[str, Any]:
    """A pod that Kueue holds back."""
    held = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "non-empty scheduling gates",
    }
    obj = pod(name, component=component, run_id=run_id, ready=False, phase="Pending", conditions=[held])
    obj["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return obj


def rollout_set(replicas: int) -> dict[str, Any]:
    """The StatefulSet of the rollouts."""
    labels = {"app.kubernetes.io/component": "rollout"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "rollout", "image": "i"}]}}
    spec = {"replicas": replicas, "serviceName": "rollout", "selector": {"matchLabels": labels}, "template": template}
    return _of("apps/v1", "StatefulSet", "rollout", spec)


def trainer_set(replicas: int) -> dict[str, Any]:
    """The StatefulSet of the trainer."""
    labels = {"app.kubernetes.io/component": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "trainer", "image": "i"}]}}
    spec = {"replicas": replicas, "serviceName": "trainer", "selector": {"matchLabels": labels}, "template": template}
    return _of("apps/v1", "StatefulSet", "trainer", spec)


def job_set(**spec: Any) -> dict[str, Any]:
    """The JobSet of a trainer."""
    jobs = {"name": "hosts", "template": {"spec": {"template": trainer_set(1)["spec"]["template"]}}}
    return _of("jobset.x-k8s.io/v1alpha2", "JobSet", "trainer", {"replicatedJobs": [jobs], **spec})


def leader_worker_set(replicas: int, size: int = 2) -> dict[str, Any]:
    """The LeaderWorkerSet of rollouts whose engines have several pods."""
    (template,) = [rollout_set(replicas)["spec"]["template"]]
    spec = {"replicas": replicas, "leaderWorkerTemplate": {"size": size, "workerTemplate": template}}
    return _of("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "rollout", spec)


def worker(name: str, **state: Any) -> dict[str, Any]:
    """A further pod of the engine that `rollout-0` of `rollout-0-1` leads, marked as LeaderWorkerSet does."""
    obj = pod(name, component="rollout-worker", **state)
    obj["metadata"]["annotations"] = {"leaderworkerset.sigs.k8s.io/leader-name": name.rpartition("-")[0]}
    return obj


def waiting_status(reason: str, message: str = "", restarts: int = 0) -> list[dict[str, Any]]:
    """containerStatuses of a pod whose container does not start."""
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": restarts, "state": state}
    return [status]


def _of(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
