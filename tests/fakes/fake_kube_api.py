"""A FAKE Kubernetes API server for tests: HTTP on loopback, objects in memory, no cluster behind it.

It answers what the coordinator calls (coordinator/fleet/kubernetes/api/client.py) and refuses the rest with 404:

list, watch        pods, by label; replayed from a resource version, 410 when that is too old
create             pods/eviction (uid precondition, PodDisruptionBudgets), events, selfsubjectaccessreviews
patch              events
get, patch         the scale of StatefulSets and LeaderWorkerSets
get, delete        JobSets, which have no scale

`apply` is what `kubectl apply` of an object does, with the refusals of fake_kube_admission.py; `bind` limits the
coordinator to a Role. It has no controllers, no scheduler and no kubelet: what a pod does, a test does. Nothing that
runs against it has run on Kubernetes.
"""

import copy
import json
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate

from tests.fakes import fake_kube_admission as admission
from tests.fakes.fake_kube_store import KINDS, Key, Object, Refusal, Store, changed, not_found, now, refusal

SCHEMAS = "1.32"
SCALED = ("statefulset", "leaderworkerset")
VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
PATH = re.compile(r"/apis?/(.+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(?:/([^/]+))?")


class Request(NamedTuple):
    """A request for objects, taken apart; name: "" for all of a kind."""

    verb: str
    resource: str  # as RBAC spells it: `pods/eviction`
    key: Key
    query: dict[str, str]
    content_type: str
    body: Object

    @property
    def what(self) -> str:
        """As `refuse` and `seen` have it."""
        return f"{self.verb} {self.resource}"


class FakeKubeApi:
    """A fake API server in threads of this process; a context manager.

    `seen` counts requests by "verb resource"; `put`, `delete` and `get` are what controllers and kubelets would do.

    Args:
        address: to listen on, for pods in containers their network's gateway.
        tls: the server's certificate; None: HTTP.
    """

    def __init__(self, *namespaces: str, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.store = Store()
        self.seen: Counter[str] = Counter()
        self._namespaces = ("default", *namespaces)
        self._refused: set[str] = set()
        self._rules: list[Object] | None = None
        # What was applied last, as kubectl's annotation has it.
        self._applied: dict[Key, Object] = {}
        self._throttled: Counter[str] = Counter()
        self._conflicts: Counter[str] = Counter()
        self._retry_after_s = 1
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer((address, 0), handler)
        if tls is not None:
            # The handshake is the connection's thread's: one that does not come must not stop the others.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_port
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake-kube-api")

    def __enter__(self) -> "FakeKubeApi":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.end_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig for this server, with a user who may do everything that is not refused."""
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "users": [{"name": "fake", "user": {"token": "fake"}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return path

    # ---- what a cluster would do ----

    def put(self, plural: str, obj: Object) -> Object:
        """Create or replace an object, status included, without validation."""
        return self.store.put((plural, obj["metadata"]["namespace"], obj["metadata"]["name"]), obj)

    def get(self, plural: str, name: str, namespace: str) -> Object:
        return self.store.get((plural, namespace, name))

    def list(self, plural: str) -> list[Object]:
        return self.store.list(plural)[0]

    def delete(self, plural: str, name: str, namespace: str) -> None:
        self.store.delete((plural, namespace, name))

    # ---- what an operator does ----

    def apply(self, obj: Object) -> str:
        """Take an object as from `kubectl apply`. Returns: "created", "configured" or "unchanged".

        Raises: Refusal: as a server would.
        """
        plural = next((each for each, kind in KINDS.items() if kind == (obj["apiVersion"], obj["kind"])), None)
        if plural is None:
            raise not_found(("", "", f'no matches for kind "{obj["kind"]}" in version "{obj["apiVersion"]}"'))
        if "/" not in obj["apiVersion"] or ".x-k8s.io" not in obj["apiVersion"]:
            admission.check_schema(obj)
        namespace, name = obj["metadata"].get("namespace", "default"), obj["metadata"]["name"]
        key = (plural, "" if plural == "namespaces" else namespace, name)
        if plural == "pods":
            admission.check_pod(self._namespace(namespace), obj, name)
        elif plural != "namespaces":
            self._namespace(namespace)
        applied = self._applied.get(key) if self.store.has(key) else None
        if applied == obj:
            return "unchanged"
        if applied is not None:
            admission.check_update(applied, obj)
        self.store.put(key, {**self.store.get(key), **obj} if applied is not None else obj)
        self._applied[key] = copy.deepcopy(obj)
        return "created" if applied is None else "configured"

    def make_pod(self, namespace: str, name: str, template: Object) -> None:
        """Make a pod as a controller does. Raises: Refusal: 403: the namespace does not admit it."""
        admission.check_pod(self._namespace(namespace), template, name)
        metadata = {**template["metadata"], "namespace": namespace, "name": name}
        self.put("pods", {**template, "metadata": metadata, "status": {"phase": "Pending"}})

    def bind(self, rules: Sequence[Object]) -> None:
        """Allow the coordinator what these rules of a Role say, and nothing else."""
        self._rules = list(rules)

    def _namespace(self, name: str) -> Object:
        """Raises: Refusal: 404."""
        key = ("namespaces", "", name)
        if self.store.has(key):
            return self.store.get(key)
        if name in self._namespaces:
            return {"metadata": {"name": name}}
        raise not_found(key)

    def _is_allowed(self, verb: str, resource: str, group: str, name: str) -> bool:
        if self._refused & {f"{verb} {resource}", f"{verb} {resource} {name}"}:
            return False
        return self._rules is None or any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules
        )

    # ---- faults ----

    def refuse(self, *what: str) -> None:
        """RBAC: "create pods/eviction" is forbidden from now on; "patch statefulsets/scale rollout": of that one."""
        self._refused |= set(what)

    def throttle(self, what: str, times: int, retry_after_s: int = 1) -> None:
        """The next requests of a kind are answered 429 with Retry-After."""
        self._throttled[what], self._retry_after_s = times, retry_after_s

    def conflict(self, what: str, times: int) -> None:
        """The next requests of a kind come too late: 409."""
        self._conflicts[what] = times

    # ---- requests ----

    def answer(self, request: Request) -> tuple[int, Object] | Iterable[Object]:
        """HTTP status and body; or the lines of a watch. Raises: Refusal."""
        what, (plural, namespace, name) = request.what, request.key
        self.seen[what] += 1
        if not self._is_allowed(request.verb, request.resource, group_of(plural), name):
            text = f'cannot {request.verb} resource "{request.resource}" in the namespace "{namespace}"'
            raise refusal(403, "Forbidden", f'{plural} "{name}" is forbidden: User "coordinator" {text}')
        if self._throttled[what] > 0:
            self._throttled[what] -= 1
            text = "the server has received too many requests and has asked us to try again later"
            raise refusal(429, "TooManyRequests", text, headers={"Retry-After": str(self._retry_after_s)})
        if self._conflicts[what] > 0:
            self._conflicts[what] -= 1
            raise changed(request.key)
        handlers: dict[str, Callable[[Request], tuple[int, Object] | Iterable[Object]]] = {
            "list pods": self._list,
            "watch pods": self._watch,
            "create pods/eviction": self._evict,
            "create events": self._create,
            "patch events": self._patch,
            "get jobsets": self._get,
            "delete jobsets": self._delete,
        }
        handlers |= {f"{verb} {kind}s/scale": self._scale for verb in ("get", "patch") for kind in SCALED}
        if what in handlers:
            return handlers[what](request)
        raise refusal(404, "NotFound", "the server could not find the requested resource")

    def review(self, asked: Object) -> tuple[int, Object]:
        """A SelfSubjectAccessReview's answer."""
        attributes = asked["spec"]["resourceAttributes"]
        sub = attributes.get("subresource")
        resource = f"{attributes['resource']}/{sub}" if sub else attributes["resource"]
        verb, group, name = attributes["verb"], attributes.get("group", ""), attributes.get("name", "")
        is_known = group_of(attributes["resource"]) == group
        allowed = is_known and self._is_allowed(verb, resource, group, name)
        return 201, {**asked, "status": {"allowed": allowed}}

    def _list(self, request: Request) -> tuple[int, Object]:
        objects, version = self.store.list("pods", request.key[1])
        items = [obj for obj in objects if _selected(obj, request.query.get("labelSelector", ""))]
        head = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": str(version)}}
        return 200, {**head, "items": items}

    def _watch(self, request: Request) -> Iterable[Object]:
        query = request.query
        after, timeout_s = int(query["resourceVersion"]), float(query["timeoutSeconds"])
        try:
            for change, obj in self.store.watch("pods", request.key[1], after, timeout_s):
                if _selected(obj, query.get("labelSelector", "")):
                    yield {"type": change, "object": obj}
        except Refusal as expired:
            yield {"type": "ERROR", "object": expired.body}
            return
        if query.get("allowWatchBookmarks", "").lower() == "true":
            head = {"kind": "Pod", "apiVersion": "v1"}
            yield {"type": "BOOKMARK", "object": {**head, "metadata": {"resourceVersion": str(self.store.version)}}}

    def _evict(self, request: Request) -> tuple[int, Object]:
        """A pod that is evicted is told to end; somebody else (a test) lets it end."""
        pod = self.store.get(request.key)
        uid = request.body.get("deleteOptions", {}).get("preconditions", {}).get("uid", pod["metadata"]["uid"])
        if uid != pod["metadata"]["uid"]:
            raise changed(request.key)
        for budget in self.store.list("poddisruptionbudgets", request.key[1])[0]:
            wanted = budget["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            if wanted and budget["status"]["disruptionsAllowed"] < 1:
                cause = {"reason": "DisruptionBudget", "message": "The disruption budget needs more healthy pods"}
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise refusal(429, "TooManyRequests", text, causes=[cause])
        pod["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 30}
        self.store.put(request.key, pod)
        return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _get(self, request: Request) -> tuple[int, Object]:
        return 200, self.store.get(request.key)

    def _delete(self, request: Request) -> tuple[int, Object]:
        self.store.delete(request.key)
        return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _create(self, request: Request) -> tuple[int, Object]:
        plural, namespace, _ = request.key
        if namespace not in self._namespaces:
            raise not_found(("namespaces", "", namespace))
        key = plural, namespace, str(request.body["metadata"]["name"])
        if self.store.has(key):
            raise refusal(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
        return 201, self.store.put(key, _valid(plural, request.body))

    def _patch(self, request: Request) -> tuple[int, Object]:
        """A merge of plain fields; of lists and objects the fake knows no merge keys."""
        nested = [name for name, value in request.body.items() if isinstance(value, list | dict)]
        if "merge-patch" not in request.content_type or nested:
            raise refusal(415, "UnsupportedMediaType", f"the fake merges no {request.content_type} of {nested}")
        return 200, self.store.put(request.key, _valid("events", {**self.store.get(request.key), **request.body}))

    def _scale(self, request: Request) -> tuple[int, Object]:
        owner = self.store.get(request.key)
        if request.verb == "patch":
            # A custom resource has no merge keys: "accepted media types include" does not name the strategic patch.
            if not request.content_type.startswith("application/merge-patch+json"):
                raise refusal(415, "UnsupportedMediaType", f"the body of the request was in {request.content_type}")
            owner["spec"]["replicas"] = int(request.body["spec"]["replicas"])
            expect = request.body.get("metadata", {}).get("resourceVersion")
            owner = self.store.put(request.key, owner, expect=expect)
        metadata = {key: owner["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        head = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata}
        return 200, {**head, "spec": {"replicas": owner["spec"]["replicas"]}, "status": {"replicas": 0}}


def group_of(plural: str) -> str:
    """API group of a kind; "" for the core group."""
    return KINDS[plural][0].rpartition("/")[0]


def _selected(obj: Object, selector: str) -> bool:
    """What a label selector lets through: `a=b,c in (d,e)`."""
    labels = obj["metadata"].get("labels") or {}
    terms = re.findall(r"([^,=\s]+)(?:=([^,]+)| in \(([^)]+)\))", selector)
    return all(labels.get(key) in (values.split(",") if values else [value]) for key, value, values in terms)


def _valid(plural: str, obj: Object) -> Object:
    """Validation as the API server does it, by the published schemas. Raises: Refusal: 422."""
    api_version, kind = KINDS[plural]
    try:
        kubernetes_validate.validate({**obj, "apiVersion": api_version, "kind": kind}, SCHEMAS, strict=False)
    except kubernetes_validate.ValidationError as error:
        raise refusal(422, "Invalid", f"{kind} is invalid: {list(error.path)}: {error.message}") from None
    return obj


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: FakeKubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        try:
            if self.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews":
                self._send(*self.api.review(body))
                return
            found = self.api.answer(self._parse(body))
            if isinstance(found, tuple):
                self._send(*found)
            else:
                self._stream(found)
        except Refusal as refused:
            self._send(refused.code, refused.body, refused.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_POST = do_PATCH = do_DELETE = do_GET

    def _parse(self, body: Object) -> Request:
        """Raises: Refusal: 404."""
        url = urlsplit(self.path)
        match, query = PATH.fullmatch(url.path), dict(parse_qsl(url.query))
        if match is None or KINDS.get(match[3], ("",))[0] != match[1]:
            raise refusal(404, "NotFound", "the server could not find the requested resource")
        namespace, plural, name, sub = match[2], match[3], match[4] or "", match[5] or ""
        verb = VERBS[self.command]
        if verb == "get" and not name:
            verb = "watch" if query.get("watch", "").lower() in ("1", "true") else "list"
        content_type = self.headers.get("Content-Type", "")
        resource = f"{plural}/{sub}" if sub else plural
        return Request(verb, resource, (plural, namespace, name), query, content_type, body)

    def _stream(self, lines: Iterable[Object]) -> None:
        """Lines of JSON, in chunks, until the time is over."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for each in lines:
            line = json.dumps(each).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, code: int, body: Object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        fixed = {"Content-Type": "application/json", "Content-Length": str(len(text))}
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
