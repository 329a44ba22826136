"""The objects of the fake cluster, the history that watches replay, and its refusals. Thread-safe."""

import copy
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]
# kind, namespace ("": the cluster's), name
Key = tuple[str, str, str]


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


def not_found(plural: str, name: str) -> Refusal:
    return refusal(404, "NotFound", f'{plural} "{name}" not found')


def changed(plural: str, name: str) -> Refusal:
    text = "the object has been modified; please apply your changes to the latest version and try again"
    return refusal(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {text}')


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return str(obj["kind"]), str(metadata.get("namespace", "")), str(metadata["name"])


class Store:
    """Objects by key; each change has the next resource version."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[Key, Object] = {}
        self._history: list[tuple[int, str, Key, Object]] = []
        self.version = 100
        # Watches from an older version have expired.
        self._oldest = 0
        # Changes when open watches are to end.
        self._generation = 0

    def list(self, kind: str, namespace: str = "") -> tuple[list[Object], int]:
        """Objects of a kind, "" for those of all namespaces, and the version of the answer."""
        with self.changed:
            found = [each for key, each in sorted(self.objects.items()) if key[0] == kind and namespace in ("", key[1])]
            return copy.deepcopy(found), self.version

    def put(self, new: Object) -> Object:
        """Create or replace. Returns: a copy."""
        with self.changed:
            key = key_of(new)
            old = self.objects.get(key, {}).get("metadata", {})
            self.version += 1
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now(), **new["metadata"]}
            metadata |= {name: old[name] for name in ("uid", "creationTimestamp") if name in old}
            metadata |= {"resourceVersion": str(self.version)}
            self.objects[key] = {**copy.deepcopy(new), "metadata": copy.deepcopy(metadata)}
            return self._note("MODIFIED" if old else "ADDED", key, self.objects[key])

    def delete(self, key: Key) -> None:
        """Raises: KeyError."""
        with self.changed:
            gone = self.objects.pop(key)
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

    def watch(self, kind: str, namespace: str, after: int, timeout_s: float) -> Iterator[tuple[str, Object]]:
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
                if key[0] == kind and namespace in ("", key[1]):
                    yield change, obj

    def _note(self, change: str, key: Key, obj: Object) -> Object:
        """Returns: a copy of the object."""
        self._history.append((self.version, change, key, copy.deepcopy(obj)))
        self.changed.notify_all()
        return copy.deepcopy(obj)


def now(later_s: float = 0.0) -> str:
    """As the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
