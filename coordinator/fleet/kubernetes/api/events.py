"""Records Kubernetes Events about the coordinator's actions on pods and sets, for `kubectl describe`.

Equal events about an object within COALESCE_S are one Event with a count, as kubelet's are. The count is written every
PATCH_INTERVAL_S at most.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import Pod
from servicekit.errors import Aborted, TandemError
from servicekit.logs import get_logger

COALESCE_S = 600.0
PATCH_INTERVAL_S = 30.0
# The API refuses longer ones.
LONGEST_MESSAGE = 1024
COMPONENT = "tandem-coordinator"

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class About:
    """The object that an Event is about."""

    kind: str
    name: str
    api_version: str = "v1"
    uid: str = ""

    @classmethod
    def pod(cls, pod: Pod) -> "About":
        """Refer to a pod."""
        return cls(kind="Pod", name=pod.name, uid=pod.uid)

    @classmethod
    def pod_set(cls, pod_set: PodSet) -> "About":
        """Refer to a set."""
        return cls(kind=pod_set.kind, name=pod_set.name, api_version=f"{pod_set.group}/{pod_set.version}")


@dataclass(kw_only=True)
class _RecordedEvent:
    """An Event that has been created."""

    name: str
    count: int
    written_s: float
    first_s: float


class EventRecorder:
    """Records Events; blocking. A failure is logged once; the coordinator's log has the same information."""

    def __init__(self, api: KubeApi, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._written: dict[tuple[About, str, str], _RecordedEvent] = {}
        self._has_failed = False

    def record(self, about: About, reason: str, message: str, *, kind: str = "Normal") -> None:
        """Create or count an Event.

        Args:
            reason: one word in CamelCase.
            kind: "Normal" or "Warning".
        """
        key, now_s = (about, reason, message), self._clock()
        self._written = {k: event for k, event in self._written.items() if now_s - event.first_s < COALESCE_S}
        known = self._written.get(key)
        try:
            if known is None:
                name = f"{about.name}.{uuid.uuid4().hex[:16]}"
                self._create(name, about, reason, message, kind)
                self._written[key] = _RecordedEvent(name=name, count=1, written_s=now_s, first_s=now_s)
                return
            known.count += 1
            if now_s - known.written_s >= PATCH_INTERVAL_S:
                known.written_s = now_s
                self._api.patch_event(known.name, {"count": known.count, "lastTimestamp": _now()})
        except TandemError as error:
            if not self._has_failed:
                log.warning("kubernetes event not recorded", error=str(error))
            self._has_failed = True

    def _create(self, name: str, about: About, reason: str, message: str, kind: str) -> None:
        namespace = self._api.namespace
        involved: dict[str, Any] = {"kind": about.kind, "apiVersion": about.api_version, "name": about.name}
        involved |= {"namespace": namespace, **({"uid": about.uid} if about.uid else {})}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message[:LONGEST_MESSAGE],
            "type": kind,
            "count": 1,
            "firstTimestamp": _now(),
            "lastTimestamp": _now(),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": COMPONENT,
        }
        try:
            self._api.create_event(body)
        except Aborted:  # an earlier try succeeded, and its answer was lost
            return


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
