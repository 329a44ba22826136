"""The objects of the fake API server, the history that watches replay, and its refusals. Thread-safe."""

import copy
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
# plural, namespace, name
Key = tuple[str, str, str]
KINDS = {
    "namespaces": ("v1", "Namespace"),
    "configmaps": ("v1", "ConfigMap"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "roles": ("rbac.authorization.k8s.io/v1", "Role"),
    "rolebindings": ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "events": ("v1", "Event"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
    "statefulsets": ("apps/v1", "StatefulSet"),
    "leaderworkersets": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
}


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is not a success. body: a Status object."""

    code: int
    body: Object
    headers: dict[str, str] = field(default_factory=dict)


def refusal(code: int, reason: str, message: str, *, headers: dict[str, str] | None = None, **details: Any) -> Refusal:
    """As the API server words it."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return Refusal(
        code, {**status, "code": code, "reason": reason, "message": message, "details": details}, headers or {}
    )


def not_found(key: Key) -> Refusal:
    return refusal(404, "NotFound", f'{key[0]} "{key[2]}" not found')


def changed(key: Key) -> Refusal:
    text = "the object has been modified; please apply your changes to the latest version and try again"
    return refusal(409, "Conflict", f'Operation cannot be fulfilled on {key[0]} "{key[2]}": {text}')


class Store:
    """Objects by key; each change has the next resource version."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._objects: dict[Key, Object] = {}
        self._history: list[tuple[int, str, Key, Object]] = []
        self.version = 100
        # Watches from an older version have expired.
        self._oldest = 0
        # Changes when open watches are to end.
        self._generation = 0

    def has(self, key: Key) -> bool:
        return key in self._objects

    def get(self, key: Key) -> Object:
        """A copy. Raises: Refusal: 404."""
        with self.changed:
            if key not in self._objects:
                raise not_found(key)
            return copy.deepcopy(self._objects[key])

    def list(self, plural: str, namespace: str = "") -> tuple[list[Object], int]:
        """Objects of a kind, "" for those of all namespaces, and the version of the answer."""
        with self.changed:
            found = [o for k, o in self._objects.items() if k[0] == plural and namespace in ("", k[1])]
            return copy.deepcopy(found), self.version

    def put(self, key: Key, new: Object, *, expect: str | None = None) -> Object:
        """Create or replace. expect: the version that the change was made to. Raises: Refusal: 409."""
        with self.changed:
            old = self._objects.get(key, {}).get("metadata", {})
            if expect and old and old["resourceVersion"] != expect:
                raise changed(key)
            self.version += 1
            api_version, kind = KINDS[key[0]]
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now(), **new["metadata"]}
            metadata |= {name: old[name] for name in ("uid", "creationTimestamp") if name in old}
            metadata |= {"resourceVersion": str(self.version)}
            self._objects[key] = {**copy.deepcopy(new), "apiVersion": api_version, "kind": kind, "metadata": metadata}
            return self._note("MODIFIED" if old else "ADDED", key, self._objects[key])

    def delete(self, key: Key) -> None:
        """Raises: Refusal: 404."""
        with self.changed:
            gone = self.get(key)
            del self._objects[key]
            self.version += 1
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._note("DELETED", key, gone)

    def expire(self) -> None:
        """Every watch from a version until now is too old, and those that are open end."""
        with self.changed:
            self.version += 1000
            self._oldest, self._history = self.version, []
            self._generation += 1
            self.changed.notify_all()

    def end_watches(self) -> None:
        """Open watches end, as by a load balancer; they may go on from where they were."""
        with self.changed:
            self._generation += 1
            self.changed.notify_all()

    def watch(self, plural: str, namespace: str, after: int, timeout_s: float) -> Iterator[tuple[str, Object]]:
        """Changes after a version, until the time is over. Raises: Refusal: 410."""
        deadline_s = time.monotonic() + timeout_s
        generation = self._generation
        while True:
            with self.changed:
                if after < self._oldest:
                    raise refusal(410, "Expired", f"too old resource version: {after} ({self._oldest})")
                found = [row for row in self._history if row[0] > after]
                if not found:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 or generation != self._generation:
                        return
                    self.changed.wait(min(left_s, 0.5))
                    continue
            for version, change, key, obj in found:
                after = version
                if key[:2] == (plural, namespace):
                    yield change, obj

    def _note(self, change: str, key: Key, obj: Object) -> Object:
        """Returns: a copy of the object."""
        self._history.append((self.version, change, key, copy.deepcopy(obj)))
        self.changed.notify_all()
        return copy.deepcopy(obj)


def now() -> str:
    """As the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
