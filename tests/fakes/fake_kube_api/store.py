"""The objects of the fake API server, and the history that watches replay. Thread-safe."""

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from tests.fakes.fake_kube_api import answers
from tests.fakes.fake_kube_api.kinds import Kind
from tests.fakes.fake_kube_api.patches import Object, Owners

# kind, namespace ("" for none), name
Key = tuple[Kind, str, str]


class Store:
    """Objects by key; each change has the next resource version."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._objects: dict[Key, Object] = {}
        self._owners: dict[Key, Owners] = {}
        self._history: list[tuple[int, str, Key, Object]] = []
        self._version = 100
        # Watches from an older version have expired.
        self._oldest = 0
        # Changes when open watches are to end.
        self._generation = 0

    @property
    def version(self) -> int:
        with self.changed:
            return self._version

    def get(self, key: Key) -> Object:
        """A copy. Raises: Refusal: 404."""
        with self.changed:
            if key not in self._objects:
                raise answers.not_found(key[0].plural, key[2])
            return copy.deepcopy(self._objects[key])

    def find(self, key: Key) -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get(key))

    def owners(self, key: Key) -> Owners:
        return dict(self._owners.get(key, {}))

    def list(self, kind: Kind, namespace: str) -> tuple[list[Object], int]:
        """Objects of a kind, "" for those of all namespaces, and the version of the answer."""
        with self.changed:
            found = [o for k, o in self._objects.items() if k[0] == kind and namespace in ("", k[1])]
            return copy.deepcopy(found), self._version

    def put(self, key: Key, new: Object, owners: Owners | None = None, *, expect: str | None = None) -> Object:
        """Create or replace. expect: the version that the change was made to. Raises: Refusal: 409."""
        with self.changed:
            old = self._objects.get(key)
            if expect and old is not None and old["metadata"]["resourceVersion"] != expect:
                raise answers.changed(key[0].plural, key[2])
            stamped = self.stamped(key, new, old)
            if old is not None and _same(old, stamped):
                return copy.deepcopy(old)
            self._version += 1
            stamped["metadata"]["resourceVersion"] = str(self._version)
            self._objects[key] = stamped
            if owners is not None:
                self._owners[key] = owners
            self._note("MODIFIED" if old is not None else "ADDED", key, stamped)
            return copy.deepcopy(stamped)

    def delete(self, key: Key) -> Object:
        """Raises: Refusal: 404."""
        with self.changed:
            gone = self.get(key)
            del self._objects[key]
            self._owners.pop(key, None)
            self._version += 1
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._note("DELETED", key, gone)
            return gone

    def stamped(self, key: Key, new: Object, old: Object | None) -> Object:
        """With the metadata that the server sets."""
        kind, namespace, name = key
        stamped = copy.deepcopy(new)
        stamped |= {"apiVersion": kind.api_version, "kind": kind.name}
        metadata = {**stamped.get("metadata", {}), "name": name}
        metadata |= {"namespace": namespace} if kind.namespaced else {}
        before = old["metadata"] if old is not None else {}
        metadata["uid"] = before.get("uid", metadata.get("uid", str(uuid.uuid4())))
        metadata["creationTimestamp"] = before.get("creationTimestamp", now())
        metadata["resourceVersion"] = before.get("resourceVersion", "")
        same_spec = old is not None and old.get("spec") == stamped.get("spec")
        metadata["generation"] = before.get("generation", 0) + (0 if same_spec else 1)
        return {**stamped, "metadata": metadata}

    def expire(self) -> None:
        """Every watch from a version until now is too old, and those that are open end."""
        with self.changed:
            self._version += 1000
            self._oldest, self._history = self._version, []
            self._generation += 1
            self.changed.notify_all()

    def end_watches(self) -> None:
        """Open watches end, as by a load balancer; they may go on from where they were."""
        with self.changed:
            self._generation += 1
            self.changed.notify_all()

    def watch(
        self, kind: Kind, namespace: str, after: int, timeout_s: float, wanted: Callable[[Object], bool]
    ) -> Iterator[tuple[str, Object]]:
        """Changes after a version, until the time is over. Raises: Refusal: 410."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            generation = self._generation
        while True:
            with self.changed:
                if after < self._oldest:
                    raise answers.expired(after, self._oldest)
                found = [row for row in self._history if row[0] > after]
                if not found:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 or generation != self._generation:
                        return
                    self.changed.wait(min(left_s, 0.5))
                    continue
            for version, change, key, obj in found:
                after = version
                if key[0] == kind and namespace in ("", key[1]) and wanted(obj):
                    yield change, obj

    def _note(self, change: str, key: Key, obj: Object) -> None:
        self._history.append((self._version, change, key, copy.deepcopy(obj)))
        self.changed.notify_all()


def now() -> str:
    """As the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _same(old: Object, new: Object) -> bool:
    """A change of nothing makes no new version."""

    def without(obj: Object) -> Any:
        return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}

    return bool(without(old) == without(new))
