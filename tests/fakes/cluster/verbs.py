"""What the fake cluster does with requests for objects, after its gate has let them pass."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.fakes.cluster.admission import check_pod, check_schema, check_update
from tests.fakes.cluster.kinds import BUILT_IN, group_of
from tests.fakes.cluster.merging import json_merge, schema_of, server_side, strategic
from tests.fakes.cluster.requests import Gate, Request
from tests.fakes.cluster.store import Key, Object, Refusal, Store, changed, key_of, not_found, now, refusal

Answer = tuple[int, Object]
_SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
WATCH_S = 60.0
_SCALED = ("StatefulSet", "LeaderWorkerSet")
_TERM = re.compile(r"(?P<key>[^!,=\s()]+)\s*(?:==?(?P<value>[^,=()]*)| in \((?P<values>[^)]+)\))(?:,|$)")


class Verbs:
    """Reads and changes the objects of a store.

    Args:
        start: returns the status of a pod that was created.
    """

    def __init__(self, store: Store, start: Callable[[Object], Object]) -> None:
        self._store, self._start = store, start
        # What each manager has applied last: the object's uid, and what of it.
        self._applied: dict[tuple[Key, str], tuple[str, Object | None]] = {}

    def answer(self, request: Request) -> Answer:
        """HTTP status and body. Raises: Refusal."""
        handlers: dict[str, Callable[[Request], Answer]] = {
            "list": self._list,
            "get": lambda request: (200, copy.deepcopy(self.existing(request))),
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "create eviction": self._evict,
            "get scale": self._scale,
            "patch scale": self._scale,
        }
        found = handlers.get(f"{request.verb} {request.sub}".strip())
        on = {"eviction": ("Pod",), "scale": _SCALED}.get(request.sub, (request.kind.name,))
        if found is None or request.kind.name not in on:
            raise refusal(404, "NotFound", "the server could not find the requested resource")
        with self._store.changed:
            answer = found(request)
            if request.kind.name == "Node":
                self._let_go()
            return answer

    def watch(self, request: Request) -> Iterator[Object]:
        """The lines of a watch."""
        query = request.query
        after = int(query.get("resourceVersion") or self._store.version)
        timeout_s = float(query.get("timeoutSeconds") or WATCH_S)
        try:
            for change, obj in self._store.watch(request.kind.name, request.namespace, after, timeout_s):
                if selected(obj, query):
                    yield {"type": change, "object": obj}
        except Refusal as expired:
            yield {"type": "ERROR", "object": expired.body}
            return
        if query.get("allowWatchBookmarks", "").lower() == "true":
            head = {"kind": request.kind.name, "apiVersion": request.kind.api_version}
            yield {"type": "BOOKMARK", "object": {**head, "metadata": {"resourceVersion": str(self._store.version)}}}

    def existing(self, request: Request) -> Object:
        """The object itself. Raises: Refusal: 404."""
        if request.key not in self._store.objects:
            raise not_found(request.kind.plural, request.name)
        return self._store.objects[request.key]

    def namespace(self, name: str) -> Object:
        """Raises: Refusal: 404."""
        if ("Namespace", "", name) not in self._store.objects:
            raise not_found("namespaces", name)
        return self._store.objects["Namespace", "", name]

    def _list(self, request: Request) -> Answer:
        objects, version = self._store.list(request.kind.name, request.namespace)
        found = [each for each in objects if selected(each, request.query)]
        first, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "1000"))
        more = {"continue": str(first + limit)} if first + limit < len(found) else {}
        head = {"kind": f"{request.kind.name}List", "apiVersion": request.kind.api_version}
        return 200, {
            **head,
            "metadata": {"resourceVersion": str(version), **more},
            "items": found[first : first + limit],
        }

    def _create(self, request: Request) -> Answer:
        body = _named(request)
        if request.namespace:
            self.namespace(request.namespace)
        if key_of(body) in self._store.objects:
            name = body["metadata"]["name"]
            raise refusal(409, "AlreadyExists", f'{request.kind.plural} "{name}" already exists')
        check_schema(body)
        if request.kind.name == "Pod":
            check_pod(self.namespace(request.namespace), body, body["metadata"]["name"])
            body["status"] = self._start(body)
        return 201, body if _is_trial(request) else self._store.put(body)

    def _update(self, request: Request) -> Answer:
        old = self.existing(request)
        body = _named(request)
        if (expect := body["metadata"].get("resourceVersion")) and expect != old["metadata"]["resourceVersion"]:
            raise changed(request.kind.plural, request.name)
        return 200, self._replace(request, old, body)

    def _replace(self, request: Request, old: Object, new: Object) -> Object:
        """Store a changed object; equal ones keep their version. Raises: Refusal."""
        owned = ("uid", "creationTimestamp", "resourceVersion")
        metadata = new["metadata"] | {key: old["metadata"][key] for key in owned if key in old["metadata"]}
        new = {**new, "metadata": metadata} | ({"status": old["status"]} if "status" in old else {})
        if new == old:
            return copy.deepcopy(old)
        check_schema(new)
        check_update(old, new)
        return copy.deepcopy(new) if _is_trial(request) else self._store.put(new)

    def _patch(self, request: Request) -> Answer:
        kind = request.kind
        if request.content_type.startswith("application/apply-patch+yaml"):
            return self._apply(request)
        old = self.existing(request)
        if request.content_type.startswith("application/merge-patch+json"):
            return 200, self._replace(request, old, json_merge(old, request.body))
        is_strategic = request.content_type.startswith("application/strategic-merge-patch+json")
        if not is_strategic or kind.api_version not in BUILT_IN:  # a custom resource has no merge keys
            raise refusal(415, "UnsupportedMediaType", f"the body of the request was in {request.content_type}")
        schema = schema_of(kind.api_version, kind.name)
        return 200, self._replace(request, old, strategic(copy.deepcopy(old), request.body, schema))

    def _apply(self, request: Request) -> Answer:
        """Server-side apply: what its manager no longer applies goes."""
        manager, kind = request.query.get("fieldManager", ""), request.kind
        if not manager or request.query.get("force") != "true":
            raise refusal(400, "BadRequest", "the fake cluster knows no owners of fields: name one and force conflicts")
        body, mine = _named(request), (request.key, manager)
        if request.key not in self._store.objects:
            answer = self._create(request._replace(body=body))
        else:
            old = self.existing(request)
            uid, before = self._applied.get(mine, ("", None))
            before = before if uid == old["metadata"]["uid"] else None
            new = server_side(copy.deepcopy(old), body, before, schema_of(kind.api_version, kind.name))
            answer = 200, self._replace(request, old, new)
        if not _is_trial(request):
            self._applied[mine] = self._store.objects[request.key]["metadata"]["uid"], body
        return answer

    def _delete(self, request: Request) -> Answer:
        before = self.existing(request)
        if _is_trial(request):
            return 200, _SUCCESS
        grace = (request.body or {}).get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        self.end(request.key, None if grace is None else int(grace))
        self._collect(request.key)
        return 200, copy.deepcopy(
            self._store.objects.get(request.key, before)
        ) if request.kind.name == "Pod" else _SUCCESS

    def end(self, key: Key, grace_s: int | None = None) -> None:
        """Delete an object. A pod is gone when its kubelet says so: at once, but where its node does not answer.

        Args:
            grace_s: 0: without the kubelet (kubectl delete --grace-period=0 --force).
        """
        pod = self._store.objects[key]
        if key[0] != "Pod" or grace_s == 0 or not is_lost(self._store, pod):
            self._store.delete(key)
        elif "deletionTimestamp" not in pod["metadata"]:
            self._store.put(told_to_end(pod, grace_s))

    def _let_go(self) -> None:
        """Pods that leave are gone once their node answers again, is deleted, or is declared out of service."""
        for key, each in list(self._store.objects.items()):
            if key[0] == "Pod" and "deletionTimestamp" in each["metadata"] and each["spec"].get("nodeName"):
                self.end(key)

    def _collect(self, key: Key) -> None:
        """The garbage collector, of pods of a set or a Job of the test."""
        if key[0] in ("Job", "JobSet", "LeaderWorkerSet", "StatefulSet"):
            for each in [one for one in self._store.objects if one[:2] == ("Pod", key[1])]:
                if each[2].startswith(f"{key[2]}-"):
                    self.end(each)

    def _evict(self, request: Request) -> Answer:
        """A pod that is evicted is told to end; somebody else (a test) lets it end."""
        pod = copy.deepcopy(self.existing(request))
        uid = request.body.get("deleteOptions", {}).get("preconditions", {}).get("uid", pod["metadata"]["uid"])
        if uid != pod["metadata"]["uid"]:
            raise changed(request.kind.plural, request.name)
        for budget in self._store.list("PodDisruptionBudget", request.namespace)[0]:
            wanted = budget["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            if wanted and budget.get("status", {}).get("disruptionsAllowed", 0) < 1:
                cause = {"reason": "DisruptionBudget", "message": "The disruption budget needs more healthy pods"}
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise refusal(429, "TooManyRequests", text, causes=[cause])
        self._store.put(told_to_end(pod))
        return 201, {**_SUCCESS, "code": 201}

    def _scale(self, request: Request) -> Answer:
        owner = copy.deepcopy(self.existing(request))
        if request.verb == "patch":
            # A custom resource has no merge keys: "accepted media types include" does not name the strategic patch.
            if not request.content_type.startswith("application/merge-patch+json"):
                raise refusal(415, "UnsupportedMediaType", f"the body of the request was in {request.content_type}")
            expect = request.body.get("metadata", {}).get("resourceVersion")
            if expect and expect != owner["metadata"]["resourceVersion"]:
                raise changed(request.kind.plural, request.name)
            owner["spec"]["replicas"] = int(request.body["spec"]["replicas"])
            owner["metadata"]["managedFields"] = [scaled_by(request.query.get("fieldManager", "unknown"))]
            owner = self._store.put(owner)
        metadata = {key: owner["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        head = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata}
        return 200, {**head, "spec": {"replicas": owner["spec"]["replicas"]}, "status": {"replicas": 0}}


def scaled_by(manager: str) -> Object:
    """What metadata.managedFields says of who has set `replicas` by /scale, since Kubernetes 1.22."""
    fields = {"fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    return {"apiVersion": "apps/v1", "manager": manager, "operation": "Update", "subresource": "scale", **fields}


def told_to_end(pod: Object, grace_s: int | None = None) -> Object:
    """A pod as deletion leaves it: its deletionTimestamp is the end of its grace period, not the begin."""
    grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
    leaves = {"deletionTimestamp": now(grace_s), "deletionGracePeriodSeconds": grace_s}
    return {**copy.deepcopy(pod), "metadata": {**pod["metadata"], **leaves}}


def is_lost(store: Store, pod: Object) -> bool:
    """Whether the node of a pod does not answer, and nobody has said that it is out of service."""
    node = store.objects.get(("Node", "", pod["spec"].get("nodeName", "")), {})
    conditions = node.get("status", {}).get("conditions", [])
    taints = [each["key"] for each in node.get("spec", {}).get("taints", [])]
    is_silent = any((each["type"], each["status"]) == ("Ready", "Unknown") for each in conditions)
    return is_silent and "node.kubernetes.io/out-of-service" not in taints


def review(gate: Gate, user: str, asked: Object) -> Answer:
    """A SelfSubjectAccessReview's answer."""
    attributes = asked["spec"]["resourceAttributes"]
    sub = attributes.get("subresource")
    resource = f"{attributes['resource']}/{sub}" if sub else attributes["resource"]
    verb, group, name = attributes["verb"], attributes.get("group", ""), attributes.get("name", "")
    is_known = group_of(attributes["resource"]) == group
    return 201, {**asked, "status": {"allowed": is_known and gate.is_allowed(user, verb, resource, group, name)}}


def selected(obj: Object, query: dict[str, str]) -> bool:
    """What the selectors let through: labels as `a=b,c in (d,e)`, a name. Raises: Refusal: 400 for others."""
    labels, selector = obj["metadata"].get("labels") or {}, query.get("labelSelector", "")
    terms = list(_TERM.finditer(selector))
    if "".join(term[0] for term in terms) != selector:
        raise refusal(400, "BadRequest", f"the fake cluster cannot parse the selector {selector!r}")
    field, _, name = query.get("fieldSelector", "").partition("=")
    if field not in ("", "metadata.name"):
        raise refusal(400, "BadRequest", f"the fake cluster selects by no field {field}")
    wanted: list[tuple[Any, list[str]]] = [
        (labels.get(term["key"]), term["values"].split(",") if term["values"] else [term["value"]]) for term in terms
    ]
    return all(value in values for value, values in wanted) and (not field or obj["metadata"]["name"] == name)


def _named(request: Request) -> Object:
    """The body as it will be stored. Raises: Refusal: 400, 422: it is of another place."""
    body, kind = request.body, request.kind
    metadata = body.get("metadata", {})
    if not metadata.get("name") or request.name not in ("", metadata["name"]):
        raise refusal(422, "Invalid", f"{kind.name} is invalid: metadata.name: {metadata.get('name')!r}")
    given = body.get("apiVersion", kind.api_version), body.get("kind", kind.name)
    if given != (kind.api_version, kind.name) or metadata.get("namespace", request.namespace) != request.namespace:
        text = f"{given[1]} in {given[0]} of namespace {metadata.get('namespace')!r} does not match the URL"
        raise refusal(400, "BadRequest", text)
    place = {"namespace": request.namespace} if request.namespace else {}
    head = {"apiVersion": kind.api_version, "kind": kind.name}
    return {**copy.deepcopy(body), **head, "metadata": {**metadata, **place}}


def _is_trial(request: Request) -> bool:
    return request.query.get("dryRun") == "All"
