"""The HTTP of the fake cluster: paths, discovery, upgrades to streams."""

import json
import re
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from launcher.deploy.live.kinds import KINDS
from tests.fakes.cluster.websocket_frames import ServerSocket
from tests.fakes.fake_kube_store import Object, Refusal, refusal

if TYPE_CHECKING:
    from tests.fakes.cluster.fake_cluster import FakeCluster

TOKEN = "operator-token"
_NAMESPACED = {(each.api_version, each.plural): each.name for each in KINDS}
_OF_THE_CLUSTER = {
    ("v1", "namespaces"): "Namespace",
    ("v1", "nodes"): "Node",
    ("storage.k8s.io/v1", "storageclasses"): "StorageClass",
}
# Custom resources are unknown until a test installs them.
BUILT_IN = frozenset(
    {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1", "autoscaling/v2"}
    | {"storage.k8s.io/v1"}
)
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[a-z0-9.-]+/v\w+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
Key = tuple[str, str, str]  # kind, namespace, name


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    cluster: "FakeCluster"
    protocol_version = "HTTP/1.1"
    _VERBS: ClassVar = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}

    def do_GET(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            # kubectl sends no token where there is no TLS.
            is_kubectl = self.headers.get("User-Agent", "").startswith("kubectl/")
            if not is_kubectl and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise refusal(401, "Unauthorized", "Unauthorized")
            self._answer(raw)
        except Refusal as refused:
            self._send(refused.code, json.dumps(refused.body).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

    def _answer(self, raw: bytes) -> None:
        url = urlsplit(self.path)
        pairs = parse_qsl(url.query, keep_blank_values=True)
        query = dict(pairs)
        if (found := _discovery(url.path, self.cluster.installed)) is not None:
            self._send(200, json.dumps(found).encode())
            return
        match = _PATH.fullmatch(url.path)
        version, plural = (match["version"], match["plural"]) if match else ("", "")
        kind = (_NAMESPACED | _OF_THE_CLUSTER).get((version, plural))
        if match is None or kind is None or version not in self.cluster.installed:
            raise refusal(404, "NotFound", "the server could not find the requested resource")
        name, sub = match["name"] or "", match["sub"] or ""
        key = kind, match["namespace"] or "", name
        if sub:
            self._sub(key, sub, query, pairs)
            return
        verb = self._VERBS[self.command]
        verb = "list" if verb == "get" and not name else verb
        if verb == "patch":
            raise refusal(415, "UnsupportedMediaType", "the fake cluster merges nothing")
        code, body = self.cluster.answer(verb, kind, key, plural, query, json.loads(raw) if raw else {})
        self._send(code, json.dumps(body).encode())

    def _sub(self, key: Key, sub: str, query: dict[str, str], pairs: list[tuple[str, str]]) -> None:
        pod = self.cluster.existing(key, "pods")
        self.cluster.seen[f"get pods/{sub}"] += 1
        if sub == "log":
            self._send(200, self.cluster.log(key[2], query).encode(), "text/plain")
        elif sub in ("exec", "portforward"):
            if pod.get("status", {}).get("phase") != "Running":
                raise refusal(400, "BadRequest", f"pod {key[2]} does not have a host assigned")
            stream = ServerSocket(self, "v4.channel.k8s.io")
            if sub == "exec":
                self.cluster.exec(pod, pairs, stream)
            else:
                self.cluster.forward(key[2], int(query["ports"]), stream)
        else:
            raise refusal(404, "NotFound", "the server could not find the requested resource")

    def _send(self, code: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _discovery(path: str, installed: set[str]) -> Object | None:
    """What kubectl asks before it creates anything: groups, and the resources of each."""
    known = _NAMESPACED | _OF_THE_CLUSTER
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = sorted(each for each in installed if "/" in each)
        groups = [
            {"name": each.split("/")[0], "versions": [_version(each)], "preferredVersion": _version(each)}
            for each in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    wanted = path.removeprefix("/apis/").removeprefix("/api/")
    if wanted not in installed:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural,
            "singularName": "",
            "namespaced": (version, plural) in _NAMESPACED,
            "kind": kind,
            "verbs": verbs,
        }
        for (version, plural), kind in known.items()
        if version == wanted
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": wanted, "resources": resources}


def _version(name: str) -> dict[str, str]:
    return {"groupVersion": name, "version": name.split("/")[1]}
