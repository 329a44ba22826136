"""The coordinator's calls to the Kubernetes API.

They block, so call them from threads. Each has a timeout, errors with verb and resource, and retries if these may help.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity
from kubernetes import client, watch

from coordinator.fleet.kubernetes.api import permissions
from coordinator.fleet.kubernetes.api.errors import Throttled, kube_errors
from coordinator.fleet.kubernetes.api.permissions import Permission
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import Pod, read_pod
from servicekit.errors import Aborted, Unavailable
from tandem_files.atomic import no_check

T = TypeVar("T")

TRIES = 4
# Between tries, unless the server asks for a longer time: at random up to 0.5, 1, 2 s.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 4.0
# The server ends a watch after this long, and the next one begins; this also ends connections that died silently.
WATCH_S = 60
_WATCH_MARGIN_S = 15.0
# As which we are noted as the one who has set a size.
MANAGER = "tandem-coordinator"


@dataclass(frozen=True, kw_only=True)
class PodChange:
    """An event of a watch; `pod` is None for a bookmark, which only updates the version."""

    kind: str
    pod: Pod | None
    resource_version: str


class KubeApi:
    """The Kubernetes API in the run's namespace. Thread-safe.

    Args:
        timeout_s: for a request and its answer.
    Attributes:
        before_change: called immediately before pods or sets are changed; raises if another coordinator leads the run.
    """

    def __init__(self, api_client: Any, namespace: str, *, timeout_s: float) -> None:
        self.namespace = namespace
        self._timeout_s = timeout_s
        self._core = client.CoreV1Api(api_client)
        self._custom = client.CustomObjectsApi(api_client)
        self._authorization = client.AuthorizationV1Api(api_client)
        self._closed = threading.Event()
        self.before_change: Callable[[], None] = no_check

    def close(self) -> None:
        """Let retries that wait fail immediately."""
        self._closed.set()

    def list_pods(self, selector: str) -> tuple[list[Pod], str]:
        """List the pods. Returns: them, and the resource version to watch from."""
        found = self._call(
            permissions.LIST_PODS, "", lambda kw: self._core.list_namespaced_pod(label_selector=selector, **kw)
        )
        return [read_pod(pod) for pod in found.items], str(found.metadata.resource_version)

    def watch_pods(self, selector: str, resource_version: str, on_open: Callable[[Any], None]) -> Iterator[PodChange]:
        """Yield changes after a version, until the server ends the watch (WATCH_S).

        Args:
            on_open: called with the watch, whose stop() ends it from another thread.
        Raises: Expired: the version is too old: list again; Unavailable, PermissionDenied.
        """
        stream = watch.Watch()
        on_open(stream)
        with kube_errors(permissions.WATCH_PODS, "", self.namespace):
            events = stream.stream(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                resource_version=resource_version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
                _request_timeout=(self._timeout_s, WATCH_S + _WATCH_MARGIN_S),
            )
            for event in events:
                version = str(event["raw_object"]["metadata"]["resourceVersion"])
                pod = None if event["type"] == "BOOKMARK" else read_pod(event["object"])
                yield PodChange(kind=event["type"], pod=pod, resource_version=version)

    def evict(self, pod: Pod) -> None:
        """Evict exactly this pod. Raises: NotReady: a PodDisruptionBudget forbids it."""
        body = client.V1Eviction(
            metadata=client.V1ObjectMeta(name=pod.name, namespace=self.namespace),
            delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid)),
        )
        self._change(
            permissions.EVICT_PODS,
            pod.name,
            lambda kw: self._core.create_namespaced_pod_eviction(name=pod.name, body=body, **kw),
        )

    def replicas_of(self, pod_set: PodSet) -> tuple[int, str]:
        """Read the desired size of a set, and the resource version of the answer."""
        scale = self._call(
            pod_set.get_scale,
            pod_set.name,
            lambda kw: self._custom.get_namespaced_custom_object_scale(**_path(pod_set), **kw),
        )
        return int(scale["spec"].get("replicas", 0)), str(scale["metadata"]["resourceVersion"])

    def size_of(self, pod_set: PodSet) -> tuple[int, str]:
        """Read the desired size of a set, and who has set its scale (metadata.managedFields); "": its manifest."""
        found = self._call(
            pod_set.get, pod_set.name, lambda kw: self._custom.get_namespaced_custom_object(**_path(pod_set), **kw)
        )
        owner = [
            str(entry["manager"])
            for entry in found["metadata"].get("managedFields", ())
            if entry.get("subresource") == "scale" and "f:replicas" in entry["fieldsV1"].get("f:spec", {})
        ]
        return int(found["spec"].get("replicas", 1)), (owner or [""])[0]

    def scale(self, pod_set: PodSet, replicas: int) -> int:
        """Set the size of a set; a concurrent change is not overwritten, but read first.

        Returns: the size before.
        """

        def once() -> int:
            before, version = self.replicas_of(pod_set)
            if before != replicas:
                self.before_change()
                body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
                with kube_errors(pod_set.patch_scale, pod_set.name, self.namespace):
                    self._custom.patch_namespaced_custom_object_scale(
                        **_path(pod_set), body=body, field_manager=MANAGER, **self._arguments()
                    )
            return before

        return self._retrying(Aborted, Unavailable)(once)

    def is_suspended(self, pod_set: PodSet) -> bool:
        """Whether a JobSet is suspended: a queue has not admitted it yet, and it has no pods."""
        found = self._call(
            pod_set.get, pod_set.name, lambda kw: self._custom.get_namespaced_custom_object(**_path(pod_set), **kw)
        )
        return bool(found["spec"].get("suspend", False))

    def delete(self, pod_set: PodSet) -> None:
        """Delete a set, and with it its pods."""
        self._change(
            pod_set.delete,
            pod_set.name,
            lambda kw: self._custom.delete_namespaced_custom_object(
                **_path(pod_set), propagation_policy="Background", **kw
            ),
        )

    def create_event(self, body: Any) -> None:
        """Create an Event."""
        self._call(permissions.CREATE_EVENTS, "", lambda kw: self._core.create_namespaced_event(body=body, **kw))

    def patch_event(self, name: str, body: dict[str, Any]) -> None:
        """Change an Event, e.g. its count."""
        self._call(
            permissions.PATCH_EVENTS, name, lambda kw: self._core.patch_namespaced_event(name=name, body=body, **kw)
        )

    def is_allowed(self, permission: Permission, name: str = "") -> bool:
        """Ask the API whether this account has a permission; every account may ask about itself."""
        resource, _, subresource = permission.resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=self.namespace,
            verb=permission.verb,
            group=permission.group,
            resource=resource,
            subresource=subresource or None,
            name=name or None,
        )
        body = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        with kube_errors(permission, name, self.namespace):
            timeouts = {"_request_timeout": self._timeout_s}
            answer = self._authorization.create_self_subject_access_review(body=body, **timeouts)
        return bool(answer.status.allowed)

    def _arguments(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "_request_timeout": self._timeout_s}

    def _call(self, permission: Permission, name: str, call: Callable[[dict[str, Any]], T]) -> T:
        """Make a request, and repeat it while the server is unreachable or throttles."""

        def once() -> T:
            with kube_errors(permission, name, self.namespace):
                return call(self._arguments())

        return self._retrying(Unavailable)(once)

    def _change(self, permission: Permission, name: str, call: Callable[[dict[str, Any]], Any]) -> None:
        """Make a request that changes something; each try of it is checked."""

        def checked(arguments: dict[str, Any]) -> None:
            self.before_change()
            call(arguments)

        self._call(permission, name, checked)

    def _retrying(self, *kinds: type[Exception]) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(kinds),
            stop=tenacity.stop_after_attempt(TRIES) | tenacity.stop_when_event_set(self._closed),
            wait=_wait_s,
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )


def _path(pod_set: PodSet) -> dict[str, str]:
    """Return the arguments of the client's calls for custom objects."""
    return {"group": pod_set.group, "version": pod_set.version, "plural": pod_set.plural, "name": pod_set.name}


_BACKOFF = tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Return the seconds until the next try, at least what the server asks for."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, Throttled) else 0.0
    return max(asked_s, float(_BACKOFF(state)))
