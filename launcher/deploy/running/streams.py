"""Streams of a pod through the API server: the output of a command in it, and its ports on this machine.

The client's own exec keeps all output in memory; results are larger than that, so that frames are read here.
"""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import websocket
from kubernetes import client, stream
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import ws_client

from coordinator.fleet.kubernetes.api.errors import translate
from launcher.deploy.running.api import REQUEST_S, OperatorApi
from launcher.deploy.running.kinds import BY_NAME
from servicekit.errors import ConfigError, NotReady, TandemError, Unavailable

STDOUT, STDERR = ws_client.STDOUT_CHANNEL, ws_client.STDERR_CHANNEL
# Before what a command refuses, on stderr.
REFUSED = "refused: "
# Longest silence of a command: it reads from a file system between two frames.
SILENCE_S = 120.0
_POD = BY_NAME["", "Pod"]
_PIPE_BYTES = 1 << 16
_ACCEPT_S = 0.5


def run_in_pod(
    api: OperatorApi, pod: str, container: str, command: Sequence[str], *, silence_s: float = SILENCE_S
) -> Iterator[tuple[int, bytes]]:
    """Run a command in a pod. Yields: its output as it comes, as (STDOUT or STDERR, bytes).

    Raises: NotReady: no such pod, or it does not run; Unavailable: the connection was lost, the command failed, or
        nothing came for `silence_s`; PermissionDenied.
    """
    what = f"exec in pod {pod} in namespace {api.namespace}"
    query = [("command", word) for word in command]
    query += [("container", container), ("stdout", "true"), ("stderr", "true")]
    url = f"{api.configuration.host}{_POD.path(api.namespace, pod)}/exec?{urlencode(query)}"
    ended = b""
    with _connected(api, url, what) as socket_:
        socket_.settimeout(silence_s)
        while True:
            try:
                opcode, frame = socket_.recv_data_frame(True)
            except (websocket.WebSocketException, OSError) as error:
                raise Unavailable(f"Kubernetes API, {what}: the connection was lost: {error}") from error
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                break
            data = bytes(frame.data) if opcode in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) else b""
            channel = data[0] if data else -1
            if channel in (STDOUT, STDERR) and len(data) > 1:
                yield channel, data[1:]
            elif channel == ws_client.ERROR_CHANNEL:
                ended += data[1:]
    _check_end(ended, what)


def answer_of(api: OperatorApi, pod: str, container: str, command: Sequence[str]) -> str:
    """Run a command in a pod to its end. Returns: what it has written to stdout.

    Raises: ConfigError: the last line that it wrote begins with REFUSED, what follows; else as `run_in_pod`.
    """
    output, complaints = bytearray(), bytearray()
    try:
        for channel, data in run_in_pod(api, pod, container, command):
            (output if channel == STDOUT else complaints).extend(data)
    except Unavailable as error:
        said = complaints.decode(errors="replace").strip().rpartition("\n")[2]
        if said.startswith(REFUSED):
            raise ConfigError(said.removeprefix(REFUSED)) from error
        raise Unavailable(f"{error}: {said}" if said else str(error)) from error
    return output.decode()


@contextlib.contextmanager
def forwarded(api: OperatorApi, pod: str, port: int) -> Iterator[str]:
    """Give an address on loopback whose connections reach a port of a pod, as `kubectl port-forward` does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_ACCEPT_S)
        stop = threading.Event()
        accepting = threading.Thread(target=_accept, args=(api, pod, port, server, stop), name="forward", daemon=True)
        accepting.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            accepting.join(2 * _ACCEPT_S)


@contextlib.contextmanager
def _connected(api: OperatorApi, url: str, what: str) -> Iterator[Any]:
    """Open a websocket. Raises: the API's errors."""
    try:
        found = _open(api, ws_client.get_websocket_url(url))
    except websocket.WebSocketBadStatusException as error:
        refused = ApiException(status=error.status_code, reason=str(error))
        refused.body = (error.resp_body or b"").decode(errors="replace")
        raise translate(refused, what) from error
    except (websocket.WebSocketException, OSError) as error:
        raise Unavailable(f"Kubernetes API, {what}: no answer: {error}") from error
    try:
        yield found
    finally:
        with contextlib.suppress(websocket.WebSocketException, OSError):
            found.close(timeout=1)


def _open(api: OperatorApi, url: str) -> Any:
    """Open a websocket as the client does, but with a deadline, which its own function lacks."""
    configuration = api.configuration
    tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
    if url.startswith("wss://") and configuration.verify_ssl:
        tls = {"cert_reqs": ssl.CERT_REQUIRED}
        if configuration.assert_hostname is not None:
            tls["check_hostname"] = configuration.assert_hostname
    named = {"ca_certs": "ssl_ca_cert", "certfile": "cert_file", "keyfile": "key_file"}
    named |= {"server_hostname": "tls_server_name"}
    tls |= {key: value for key, name in named.items() if (value := getattr(configuration, name))}
    headers = [f"{name}: {text}" for name, text in api.headers().items()]
    protocols = [ws_client.V5_CHANNEL_PROTOCOL, ws_client.V4_CHANNEL_PROTOCOL]
    options: dict[str, Any] = {"header": headers, "subprotocols": protocols}
    if configuration.proxy or configuration.proxy_headers:
        options = ws_client.websocket_proxycare(options, configuration, url, api.headers())
    return websocket.create_connection(url, timeout=REQUEST_S, sslopt=tls, **options)


def _check_end(ended: bytes, what: str) -> None:
    """Read how a command ended. Raises: Unavailable: it failed, or its end did not come."""
    try:
        status = json.loads(ended)
    except ValueError as error:
        raise Unavailable(f"Kubernetes API, {what}: the connection ended before the command") from error
    if status.get("status") != "Success":
        raise Unavailable(f"Kubernetes API, {what}: {status.get('message') or 'the command failed'}")


def _accept(api: OperatorApi, pod: str, port: int, server: socket.socket, stop: threading.Event) -> None:
    """Forward each connection in threads of its own, until `stop`."""
    while not stop.is_set():
        try:
            ours, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        ours.settimeout(None)
        try:
            theirs = _open_port(api, pod, port)
        except TandemError:
            ours.close()  # the caller sees a lost connection, and says what it was for
            continue
        for source, target in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=_pipe, args=(source, target), name="forward", daemon=True).start()


def _open_port(api: OperatorApi, pod: str, port: int) -> Any:
    """Connect to a port of a pod. Raises: NotReady, Unavailable."""
    # Its own client: a stream changes the one that it uses while it connects.
    core = client.CoreV1Api(client.ApiClient(api.configuration))
    try:
        found = stream.portforward(core.connect_get_namespaced_pod_portforward, pod, api.namespace, ports=str(port))
    except (ApiException, websocket.WebSocketException, OSError) as error:
        raise NotReady(f"Kubernetes API, port-forward to {port} of pod {pod}: {error}") from error
    opened = found.socket(port)
    opened.setblocking(True)
    return opened


def _pipe(source: Any, target: Any) -> None:
    """Copy until one of the two ends, then end both."""
    with contextlib.suppress(OSError):
        while data := source.recv(_PIPE_BYTES):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
