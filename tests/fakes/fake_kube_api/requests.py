"""One request to the fake API server: from a path and a query to what it does to the store."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.fakes.fake_kube_api import answers, patches
from tests.fakes.fake_kube_api.kinds import KINDS, Kind
from tests.fakes.fake_kube_api.patches import Object
from tests.fakes.fake_kube_api.store import Key, Store, now
from tests.fakes.fake_kube_api.validation import validate

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for objects, taken apart. name: "" for all of a kind; namespace: "" for all namespaces."""

    verb: str
    kind: Kind
    namespace: str
    name: str
    subresource: str
    query: Mapping[str, str]

    @property
    def resource(self) -> str:
        """As RBAC spells it: `pods/eviction`."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural

    @property
    def key(self) -> Key:
        return self.kind, self.namespace if self.kind.namespaced else "", self.name

    @property
    def is_dry_run(self) -> bool:
        return self.query.get("dryRun") == "All"


def parse(method: str, target: str) -> Request | None:
    """None: it is not about objects (discovery, say)."""
    url = urlsplit(target)
    query = dict(parse_qsl(url.query))
    parts = url.path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        api_version, rest = parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        api_version, rest = "/".join(parts[1:3]), parts[3:]
    else:
        return None
    namespace = ""
    # A namespace is an object itself: /namespaces/NAME and /namespaces/NAME/status are about it.
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    kind = next((k for k in KINDS if (k.api_version, k.plural) == (api_version, rest[0])), None)
    if kind is None:
        raise answers.Refusal(404, "NotFound", "the server could not find the requested resource")
    name, sub = [*rest[1:], "", ""][:2]
    if method == "GET":
        verb = "get" if name else "watch" if query.get("watch") in ("1", "true") else "list"
    else:
        verb = _VERBS[method]
    return Request(verb=verb, kind=kind, namespace=namespace, name=name, subresource=sub, query=query)


def selects(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """What the label and field selectors of a query let through: `a=b`, `a!=b`, `a in (b,c)`."""
    labels = _terms(query.get("labelSelector", ""))
    fields = _terms(query.get("fieldSelector", ""))

    def wanted(obj: Object) -> bool:
        own = obj["metadata"].get("labels") or {}
        by_field = all(str(_field(obj, key)) in values for key, values in fields)
        return by_field and all(own.get(key) in values for key, values in labels)

    return wanted


def _terms(selector: str) -> list[tuple[str, list[str]]]:
    terms = []
    while selector := selector.lstrip(", "):
        key, _, rest = selector.partition(" in (") if " in (" in selector.split("=")[0] else selector.partition("=")
        if selector.startswith(f"{key} in ("):
            values, _, selector = rest.partition(")")
            terms.append((key.strip(), [value.strip() for value in values.split(",")]))
        else:
            value, _, selector = rest.lstrip("=").partition(",")
            terms.append((key.strip(), [value.strip()]))
    return terms


def _field(obj: Object, path: str) -> Any:
    node: Any = obj
    for part in path.split("."):
        node = node.get(part, "") if isinstance(node, dict) else ""
    return node


class Rest:
    """Answers requests for objects from a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        """HTTP status and body. Raises: Refusal."""
        if request.kind.is_custom and "strategic" in content_type:
            raise answers.unsupported_media_type(content_type)
        if request.subresource == "eviction":
            return 201, self._evict(request)
        if request.subresource == "scale":
            return 200, self._scale(request, content_type, raw)
        handler = getattr(self, f"_{request.verb}")
        answer: tuple[int, Object] = handler(request, content_type, raw)
        return answer

    def _get(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        return 200, self._store.get(request.key)

    def _list(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        objects, version = self._store.list(request.kind, request.namespace)
        items = [obj for obj in objects if selects(request.query)(obj)]
        head = {"kind": f"{request.kind.name}List", "apiVersion": request.kind.api_version}
        return 200, {**head, "metadata": {"resourceVersion": str(version)}, "items": items}

    def _create(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        new = decode(raw)
        key = request.kind, request.key[1], str(new["metadata"]["name"])
        if self._store.find(key) is not None:
            raise answers.already_exists(request.kind.plural, key[2])
        owners = dict.fromkeys(patches.leaves(new), request.query.get("fieldManager", "unknown"))
        return 201, self._save(request, key, new, owners)

    def _update(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        new = decode(raw)
        self._store.get(request.key)
        return 200, self._save(request, request.key, new, None, expect=new["metadata"].get("resourceVersion"))

    def _delete(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        if request.is_dry_run:
            return 200, self._store.get(request.key)
        return 200, self._store.delete(request.key)

    def _patch(self, request: Request, content_type: str, raw: bytes) -> tuple[int, Object]:
        if content_type.startswith("application/apply-patch"):
            return self._apply(request, decode(raw))
        old, patch = self._store.get(request.key), decode(raw)
        if content_type.startswith("application/json-patch"):
            new = patches.json_patch(old, patch)
        else:
            new = patches.merge(old, patch, by_name="strategic" in content_type)
        expect = None if isinstance(patch, list) else patch.get("metadata", {}).get("resourceVersion")
        manager = request.query.get("fieldManager", "unknown")
        before = patches.leaves(old)
        owners = self._store.owners(request.key)
        owners |= {path: manager for path, value in patches.leaves(new).items() if before.get(path) != value}
        return 200, self._save(request, request.key, new, owners, expect=expect)

    def _apply(self, request: Request, config: Object) -> tuple[int, Object]:
        manager = request.query.get("fieldManager")
        if not manager:
            raise answers.Refusal(422, "Invalid", "PatchOptions is invalid: fieldManager: Required value")
        old = self._store.find(request.key)
        owners = self._store.owners(request.key)
        force = request.query.get("force") == "true"
        new, owners = patches.apply(old, config, owners, manager, force=force)
        expect = config.get("metadata", {}).get("resourceVersion")
        return (201 if old is None else 200), self._save(request, request.key, new, owners, expect=expect)

    def _save(
        self, request: Request, key: Key, new: Object, owners: patches.Owners | None, *, expect: str | None = None
    ) -> Object:
        """Validate and store, or only say what would be stored."""
        kind, namespace, name = key
        if kind.namespaced and self._store.find((_NAMESPACE, "", namespace)) is None:
            raise answers.not_found("namespaces", namespace)
        # Events are written all the time, and by clients that send what the schema lets them.
        validate(kind, new, strict=request.query.get("fieldValidation") == "Strict")
        if request.is_dry_run:
            old = self._store.find(key)
            if expect and old is not None and old["metadata"]["resourceVersion"] != expect:
                raise answers.changed(kind.plural, name)
            return self._store.stamped(key, new, old)
        return self._store.put(key, new, owners, expect=expect)

    def _evict(self, request: Request) -> Object:
        """A pod that is evicted is told to end; somebody else (a test) lets it end."""
        pod = self._store.get(request.key)
        budgets, _ = self._store.list(_BUDGET, request.namespace)
        for budget in budgets:
            wanted = budget["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            if wanted and budget.get("status", {}).get("disruptionsAllowed", 1) < 1:
                raise answers.disruption_budget(budget["metadata"]["name"])
        if not request.is_dry_run:
            pod["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 30}
            self._store.put(request.key, pod)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _scale(self, request: Request, content_type: str, raw: bytes) -> Object:
        owner = self._store.get(request.key)
        if request.verb in ("patch", "update"):
            patch = decode(raw)
            expect = patch.get("metadata", {}).get("resourceVersion")
            owner["spec"]["replicas"] = int(patch["spec"]["replicas"])
            if not request.is_dry_run:
                owner = self._store.put(request.key, owner, expect=expect)
        metadata = {key: owner["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": metadata,
            "spec": {"replicas": owner["spec"].get("replicas", 1)},
            "status": {"replicas": owner.get("status", {}).get("replicas", 0)},
        }


def decode(raw: bytes) -> Any:
    """JSON, or YAML, which kubectl applies. Raises: Refusal: 415, protobuf, which `kubectl auth` and `drain` send."""
    if raw.startswith(b"k8s\0"):
        raise answers.Refusal(415, "UnsupportedMediaType", "the fake API server does not read protobuf")
    try:
        return json.loads(raw)
    except ValueError:
        return yaml.safe_load(raw)


_NAMESPACE = next(kind for kind in KINDS if kind.plural == "namespaces")
_BUDGET = next(kind for kind in KINDS if kind.plural == "poddisruptionbudgets")
