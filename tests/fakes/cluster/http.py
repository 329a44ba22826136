"""The HTTP of the fake cluster: who asks, paths, watches, upgrades to streams."""

import json
import re
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.cluster.discovery import discover
from tests.fakes.cluster.kinds import BY_PATH
from tests.fakes.cluster.requests import OPERATOR, Request
from tests.fakes.cluster.store import Object, Refusal, refusal
from tests.fakes.cluster.verbs import review
from tests.fakes.cluster.websocket_frames import ServerSocket

if TYPE_CHECKING:
    from tests.fakes.cluster.fake_cluster import FakeCluster

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[a-z0-9.-]+/v\w+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
_STREAMS = ("log", "exec", "portforward")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    cluster: "FakeCluster"
    protocol_version = "HTTP/1.1"
    # An answer's head and its body are two packets: the second would wait 40 ms for the first one's delayed ACK.
    disable_nagle_algorithm = True
    _VERBS: ClassVar = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}

    def do_GET(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._answer(self._user(), json.loads(raw) if raw else {})
        except Refusal as refused:
            self._send(refused.code, json.dumps(refused.body).encode(), headers=refused.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

    def _user(self) -> str:
        """Raises: Refusal: 401."""
        if self.headers.get("User-Agent", "").startswith("kubectl/"):
            return OPERATOR
        # Pods' clients write the scheme in small letters, which counts as the same.
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = ""
        user = next((name for name, each in self.cluster.tokens.items() if each == token), None)
        if user is None:
            raise refusal(401, "Unauthorized", "Unauthorized")
        return user

    def _answer(self, user: str, body: Object) -> None:
        url = urlsplit(self.path)
        pairs = parse_qsl(url.query, keep_blank_values=True)
        if url.path == REVIEWS and self.command == "POST":
            self._object(*review(self.cluster, user, body))
        elif (found := discover(url.path, self.cluster.installed)) is not None:
            self._object(200, found)
        else:
            request = self._parse(user, url.path, dict(pairs), body)
            if request.sub in _STREAMS and request.kind.name == "Pod":
                self._of_a_pod(request, pairs)
            elif request.verb == "watch":
                self._lines(self.cluster.watch(request))
            else:
                self._object(*self.cluster.handle(request))

    def _parse(self, user: str, path: str, query: dict[str, str], body: Object) -> Request:
        """Raises: Refusal: 404."""
        match = _PATH.fullmatch(path)
        kind = BY_PATH.get((match["version"], match["plural"])) if match else None
        if match is None or kind is None or kind.api_version not in self.cluster.installed:
            raise refusal(404, "NotFound", "the server could not find the requested resource")
        verb, name, sub = self._VERBS[self.command], match["name"] or "", match["sub"] or ""
        if verb == "get" and not name:
            verb = "watch" if query.get("watch", "").lower() in ("1", "true") else "list"
        content_type = self.headers.get("Content-Type", "")
        return Request(user, verb, kind, match["namespace"] or "", name, sub, query, content_type, body)

    def _of_a_pod(self, request: Request, pairs: list[tuple[str, str]]) -> None:
        pod = self.cluster.pod(request)
        if request.sub == "log":
            self._send(200, self.cluster.log(request.name, request.query).encode(), "text/plain")
            return
        if pod.get("status", {}).get("phase") != "Running":
            raise refusal(400, "BadRequest", f"pod {request.name} does not have a host assigned")
        stream = ServerSocket(self, "v4.channel.k8s.io")
        if request.sub == "exec":
            self.cluster.exec(pod, pairs, stream)
        else:
            self.cluster.forward(request.name, int(request.query["ports"]), stream)

    def _lines(self, lines: Iterable[Object]) -> None:
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

    def _object(self, code: int, obj: Object) -> None:
        self._send(code, json.dumps(obj).encode())

    def _send(
        self, code: int, body: bytes, content_type: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        fixed = {"Content-Type": content_type, "Content-Length": str(len(body))}
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
