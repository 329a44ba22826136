"""The fake API server's HTTP side: discovery, watches, faults, and the doors that tests use."""

import json
import threading
from collections import Counter
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.fakes.fake_kube_api import answers, openapi
from tests.fakes.fake_kube_api.answers import Refusal
from tests.fakes.fake_kube_api.kinds import KINDS, Kind, group_list, resource_list
from tests.fakes.fake_kube_api.patches import Object
from tests.fakes.fake_kube_api.requests import Request, Rest, decode, parse, selects
from tests.fakes.fake_kube_api.store import Store

VERSION = {"major": "1", "minor": "32", "gitVersion": "v1.32.0-fake", "platform": "linux/amd64"}
DEFAULT_WATCH_S = 30.0


class FakeKubeApi:
    """A fake API server in threads of this process; a context manager.

    `seen` counts requests by "verb resource"; `put`, `delete` and `get` are what controllers and kubelets would do.
    """

    def __init__(self, *namespaces: str) -> None:
        self.store = Store()
        self.rest = Rest(self.store)
        self.seen: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._throttled: Counter[str] = Counter()
        self._conflicts: Counter[str] = Counter()
        self.retry_after_s = 1
        for namespace in ("default", *namespaces):
            self.put("namespaces", {"metadata": {"name": namespace}})
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig for this server, with a user who may do everything that is not refused."""
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "fake"}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return path

    # ---- what a cluster would do ----

    def put(self, plural: str, obj: Object) -> Object:
        """Create or replace an object, status included, without validation."""
        return self.store.put(self._key(plural, obj["metadata"]["name"], obj["metadata"].get("namespace", "")), obj)

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        return self.store.get(self._key(plural, name, namespace))

    def list(self, plural: str) -> list[Object]:
        return self.store.list(self._kind(plural), "")[0]

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        self.store.delete(self._key(plural, name, namespace))

    # ---- faults ----

    def refuse(self, *what: str) -> None:
        """RBAC: "create pods/eviction" is forbidden from now on."""
        self._refused |= set(what)

    def allow(self, *what: str) -> None:
        self._refused -= set(what)

    def throttle(self, what: str, times: int, retry_after_s: int = 1) -> None:
        """The next requests of a kind are answered 429 with Retry-After."""
        self._throttled[what], self.retry_after_s = times, retry_after_s

    def conflict(self, what: str, times: int) -> None:
        """The next requests of a kind come too late: 409."""
        self._conflicts[what] = times

    def check(self, request: Request) -> None:
        """Count the request. Raises: Refusal: a fault is set for it."""
        what = f"{request.verb} {request.resource}"
        self.seen[what] += 1
        if what in self._refused:
            raise answers.forbidden(request.verb, request.resource, request.kind.group, request.name, request.namespace)
        if self._throttled[what] > 0:
            self._throttled[what] -= 1
            raise answers.throttled(self.retry_after_s)
        if self._conflicts[what] > 0:
            self._conflicts[what] -= 1
            raise answers.changed(request.kind.plural, request.name)

    def may(self, attributes: Object) -> bool:
        """A SelfSubjectAccessReview's answer."""
        sub = attributes.get("subresource")
        resource = f"{attributes['resource']}/{sub}" if sub else attributes["resource"]
        return f"{attributes['verb']} {resource}" not in self._refused

    def _key(self, plural: str, name: str, namespace: str) -> tuple[Kind, str, str]:
        kind = self._kind(plural)
        return kind, namespace if kind.namespaced else "", name

    def _kind(self, plural: str) -> Kind:
        return next(kind for kind in KINDS if kind.plural == plural)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: FakeKubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._dispatch(raw)
        except Refusal as refusal:
            self._send(refusal.code, refusal.body(), refusal.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _dispatch(self, raw: bytes) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"):
            review = decode(raw)
            allowed = self.api.may(review["spec"]["resourceAttributes"])
            self._send(201, {**review, "status": {"allowed": allowed}})
            return
        document = discovery(path)
        if document is not None:
            self._send(200, document)
            return
        request = parse(self.command, self.path)
        if request is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        self.api.check(request)
        if request.verb == "watch":
            self._watch(request)
        else:
            self._send(*self.api.rest.answer(request, self.headers.get("Content-Type", ""), raw))

    def _watch(self, request: Request) -> None:
        """Lines of JSON, in chunks, until the time is over."""
        store, query = self.api.store, request.query
        after = query.get("resourceVersion", "")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        timeout_s = float(query.get("timeoutSeconds", DEFAULT_WATCH_S))
        try:
            if after in ("", "0"):
                objects, version = store.list(request.kind, request.namespace)
                self._lines(("ADDED", obj) for obj in objects if selects(query)(obj))
                after = str(version)
            self._lines(store.watch(request.kind, request.namespace, int(after), timeout_s, selects(query)))
            if query.get("allowWatchBookmarks") == "true":
                head = {"kind": request.kind.name, "apiVersion": request.kind.api_version}
                self._lines([("BOOKMARK", {**head, "metadata": {"resourceVersion": str(store.version)}})])
        except Refusal as refusal:
            self._lines([("ERROR", refusal.body())])
        self.wfile.write(b"0\r\n\r\n")

    def _lines(self, events: Iterable[tuple[str, Object]]) -> None:
        for change, obj in events:
            line = json.dumps({"type": change, "object": obj}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()

    def _send(self, code: int, body: Object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def discovery(path: str) -> Object | None:
    """The documents by which clients find out what there is."""
    path = path.rstrip("/")
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return group_list()
    if path == openapi.PREFIX:
        return openapi.index()
    if path.startswith(openapi.PREFIX):
        return openapi.document(path.removeprefix(openapi.PREFIX + "/"))
    version = path.removeprefix("/api/") if path.startswith("/api/") else path.removeprefix("/apis/")
    if version in {kind.api_version for kind in KINDS}:
        return resource_list(version)
    return None
