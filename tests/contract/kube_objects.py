"""Objects that the tests put into the fake API server: pods as their set would make them."""

from typing import Any

NAMESPACE = "tandem"


def pod(
    name: str,
    *,
    component: str = "rollout",
    run_id: str = "t",
    ready: bool = True,
    phase: str = "Running",
    **status: Any,
) -> dict[str, Any]:
    """A pod, with the labels by which the coordinator finds it."""
    labels = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/component": component, "tandem.run/id": run_id}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {"containers": [{"name": component, "image": f"tandem-{component}:test"}]},
        "status": {"phase": phase, "conditions": conditions, **status},
    }


def rollout_set(replicas: int) -> dict[str, Any]:
    """The StatefulSet of the rollouts."""
    labels = {"app.kubernetes.io/component": "rollout"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "rollout", "image": "i"}]}}
    spec = {"replicas": replicas, "serviceName": "rollout", "selector": {"matchLabels": labels}, "template": template}
    return {"metadata": {"name": "rollout", "namespace": NAMESPACE}, "spec": spec}


def waiting_status(reason: str, message: str = "", restarts: int = 0) -> list[dict[str, Any]]:
    """containerStatuses of a pod whose container does not start."""
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": restarts, "state": state}
    return [status]
