"""A pod that has a run's claim: made for as long as it is needed, deleted afterwards."""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

from coordinator.fleet.kubernetes.api.pods import COMPONENT_LABEL, NAME, NAME_LABEL, RUN_LABEL
from launcher.deploy import restricted
from launcher.deploy.running.api import Object, OperatorApi
from launcher.deploy.running.run import POD, RUN_ROOT
from servicekit.errors import DeadlineExceeded, NotReady, PermissionDenied, TandemError

CONTAINER = "files"
# It ends by itself if this machine does not come back to delete it.
_LIVES_S = 24 * 3600
_LOOK_AGAIN_S = 1.0


@contextlib.contextmanager
def helper_pod(
    api: OperatorApi, run: str, image: str, claim: str, *, read_only: bool, timeout_s: float
) -> Iterator[str]:
    """Give the name of a running pod that mounts a claim where the run's pods do.

    Raises: NotReady: it cannot start: the image, the claim; DeadlineExceeded: it has not started in `timeout_s`.
    """
    name = f"{run}-files-{secrets.token_hex(3)}"
    namespace: Object | None = None
    with contextlib.suppress(PermissionDenied):
        namespace = api.read(f"/api/v1/namespaces/{api.namespace}", f"get namespace {api.namespace}")
    pod = _pod(name, run, image, claim, read_only=read_only)
    pod["spec"] |= restricted.pod(namespace)
    api.create(POD, pod)
    try:
        _await_running(api, name, timeout_s)
        yield name
    finally:
        with contextlib.suppress(TandemError):
            api.delete(POD, name)


def _pod(name: str, run: str, image: str, claim: str, *, read_only: bool) -> Object:
    """Make a pod as restricted as a run's, near the run's pods: a claim may be of one node."""
    labels = {NAME_LABEL: NAME, COMPONENT_LABEL: "operator", RUN_LABEL: run}
    amounts = {"cpu": "500m", "memory": "512Mi"}
    container = restricted.CONTAINER | {
        "name": CONTAINER,
        "image": image,
        "command": ["sleep", str(_LIVES_S)],
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [{"name": "run", "mountPath": RUN_ROOT, "readOnly": read_only}],
    }
    spec = {
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": _LIVES_S,
        "affinity": restricted.near({RUN_LABEL: run}),
        "containers": [container],
        "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": claim, "readOnly": read_only}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _await_running(api: OperatorApi, name: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        pod = api.get(POD, name)
        status = {} if pod is None else pod.get("status", {})
        if status.get("phase") == "Running":
            return
        if pod is None or status.get("phase") in ("Failed", "Succeeded"):
            raise NotReady(f"pod {name} has ended before it was used: {status.get('message') or status.get('reason')}")
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"pod {name} does not run after {timeout_s:g} s: {_why(status)}")
        pause.wait(_LOOK_AGAIN_S)


def _why(status: Object) -> str:
    """Say what a pod waits for."""
    for entry in status.get("containerStatuses") or []:
        waiting = (entry.get("state") or {}).get("waiting")
        if waiting:
            return ": ".join(text for text in (waiting.get("reason"), waiting.get("message")) if text)
    for condition in status.get("conditions") or []:
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])
    return "it is not scheduled yet"
