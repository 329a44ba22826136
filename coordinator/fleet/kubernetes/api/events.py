"""Kubernetes Events about what the coordinator does to pods and sets: `kubectl describe pod` shows them.

The same event about the same object within COALESCE_S is one Event with a count, as kubelet's are; what is repeated
more often than PATCH_INTERVAL_S is counted here and written with a later one.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.pods import Pod
from coordinator.fleet.kubernetes.api.rollout_set import RolloutSet
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
        """A pod."""
        return cls(kind="Pod", name=pod.name, uid=pod.uid)

    @classmethod
    def rollout_set(cls, rollout_set: RolloutSet) -> "About":
        """The rollout set."""
        api_version = f"{rollout_set.group}/{rollout_set.version}"
        return cls(kind=rollout_set.kind, name=rollout_set.name, api_version=api_version)


@dataclass(kw_only=True)
class _Written:
    """An Event that is there."""

    name: str
    count: int
    written_s: float
    first_s: float


class EventRecorder:
    """Writes Events; blocking. What cannot be written is logged once, and is in the log anyhow."""

    def __init__(self, api: KubeApi, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._written: dict[tuple[About, str, str], _Written] = {}
        self._has_failed = False

    def record(self, about: About, reason: str, message: str, *, kind: str = "Normal") -> None:
        """Write or count an Event. kind: "Normal" or "Warning"; reason: CamelCase, why in one word."""
        key, now_s = (about, reason, message), self._clock()
        self._written = {k: each for k, each in self._written.items() if now_s - each.first_s < COALESCE_S}
        known = self._written.get(key)
        try:
            if known is None:
                name = f"{about.name}.{uuid.uuid4().hex[:16]}"
                self._create(name, about, reason, message, kind)
                self._written[key] = _Written(name=name, count=1, written_s=now_s, first_s=now_s)
                return
            known.count += 1
            if now_s - known.written_s >= PATCH_INTERVAL_S:
                known.written_s = now_s
                self._api.patch_event(known.name, {"count": known.count, "lastTimestamp": _now()})
        except TandemError as error:
            if not self._has_failed:
                log.warning("Events are not recorded", error=str(error))
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
        except Aborted:  # an earlier try has got through, and its answer was lost
            return


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
