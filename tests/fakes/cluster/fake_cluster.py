"""A FAKE Kubernetes cluster for tests: its API server on loopback, objects in memory, nothing behind it.

What the coordinator, an operator's machine and a real kubectl call, for the user whose token they show:

    REST           of all kinds of a run; custom resources that are `installed`; dryRun=All stores nothing
    watch          replayed from a resource version, 410 when that is too old
    pods           created ones run immediately, if their claims exist; deleted ones are gone immediately, and with
                   them what they own is not: there are no controllers, a test makes the pods of sets itself, as
                   controllers.py says
    lost nodes     their pods leave until the node answers, is deleted or `out-of-service`, or they are without grace
    eviction       with the uid precondition, and PodDisruptionBudgets' `disruptionsAllowed`
    scale          of StatefulSets and LeaderWorkerSets
    log, exec      lines of the test; a command on this machine, with the paths of the pod's claims replaced by their
                   folders
    port-forward   connects to `ports`

What it refuses is in admission.py (schemas, immutable fields, PodSecurity), pods.py (of pods) and requests.py (RBAC;
faults). 401 without a token, 404 for what it does not have, 409 for a change of an older version.

It has no scheduler, no controllers, no kubelet, no webhooks, no quotas, no defaults, no `generation`; PATCH merges as
merging.py says, and server-side apply knows no owners of fields, so that it must be forced; PodSecurity knows the level
`restricted`; roles are those that `bind` is given, not the cluster's objects. Nothing that runs against it has run on
Kubernetes.
"""

import copy
import json
import ssl
import threading
from collections.abc import Collection, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from launcher.deploy.running.kinds import Kind
from tests.fakes.cluster.admission import check_pod
from tests.fakes.cluster.http import Handler
from tests.fakes.cluster.kinds import BUILT_IN, kind_of
from tests.fakes.cluster.requests import OPERATOR, TOKENS, Gate, Request
from tests.fakes.cluster.store import Key, Object, Store, key_of, now, refusal
from tests.fakes.cluster.streams import connect, run_command
from tests.fakes.cluster.verbs import Verbs, told_to_end
from tests.fakes.cluster.websocket_frames import ServerSocket


class FakeCluster(Gate):
    """A fake cluster in threads of this process; a context manager.

    Attributes:
        store: the objects, and their history; `objects` are those themselves, by kind, namespace and name.
        installed: the versions of the API that there are: the built-in ones and `custom`.
        claims: folders of claims, by name; a pod that mounts another one stays Pending.
        logs: lines of a pod, without times.
        ports: (pod, port) -> address on this machine.
        break_after: bytes after which the next execs lose their connection, one entry per exec.
        port: of the server.
    Args:
        address: to listen on; for pods in containers their network's gateway.
        tls: the server's certificate; None: HTTP.
    """

    def __init__(
        self,
        *namespaces: str,
        custom: Collection[str] = (),
        address: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.store = Store()
        self.objects = self.store.objects
        self.installed = {*BUILT_IN, *custom}
        self.claims: dict[str, Path] = {}
        self.logs: dict[str, list[str]] = {}
        self.ports: dict[tuple[str, int], tuple[str, int]] = {}
        self.break_after: list[int] = []
        self._verbs = Verbs(self.store, self._started)
        handler = type("Handler", (Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer((address, 0), handler)
        if tls is not None:
            # The handshake is left to the connection's thread: one that does not come must not stop the others.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_port
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake-cluster")
        for name in namespaces:
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def __enter__(self) -> "FakeCluster":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.end_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, path: Path, namespace: str = "default", user: str = OPERATOR) -> Path:
        """A kubeconfig for this server, of one of its users."""
        context = {"cluster": "fake", "user": user, "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": user, "user": {"token": TOKENS[user]}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return path

    # ---- what a test, a controller or a kubelet does ----

    def put(self, obj: Object) -> Object:
        """Create or replace an object, status included, unchecked."""
        return self.store.put(obj)

    def get(self, kind: str, name: str, namespace: str) -> Object:
        """A copy. Raises: KeyError."""
        return copy.deepcopy(self.objects[kind, namespace, name])

    def list_of(self, kind: str) -> list[Object]:
        return self.store.list(kind)[0]

    def delete(self, kind: str, name: str, namespace: str) -> None:
        """Raises: KeyError."""
        self.store.delete((kind, namespace, name))

    def node(self, name: str, gpus: int, *taints: str, **labels: str) -> None:
        """A node with 192 CPUs, 2000 GiB, so many GPUs and a kubelet's labels; taints as key:effect."""
        labels |= {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        allocatable = {"cpu": "192", "memory": "2000Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        spec = {"taints": [dict(zip(("key", "effect"), each.split(":"), strict=True)) for each in taints]}
        head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.put({**head, "spec": spec, "status": {"allocatable": allocatable}})

    def lose_node(self, name: str, ago_s: float = 0.0) -> None:
        """A node that does not answer, from which the pods were evicted so long ago."""
        node = self.get("Node", name, "")
        condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
        self.put({**node, "status": {**node["status"], "conditions": [condition]}})
        for pod in self.list_of("Pod"):
            if pod["spec"].get("nodeName") == name:
                grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
                gone = told_to_end(pod)
                gone["metadata"]["deletionTimestamp"] = now(grace_s - ago_s)
                # The node's controller says that they are not ready; their containers stay as they were last seen.
                ready = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
                others = [each for each in pod["status"].get("conditions", []) if each["type"] != "Ready"]
                self.put({**gone, "status": {**gone["status"], "conditions": [*others, ready]}})

    def claim(self, name: str, namespace: str, *modes: str, folder: Path | None = None, **labels: str) -> None:
        """A bound claim, with a folder of this machine behind it."""
        head = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        spec = {"accessModes": list(modes), "resources": {"requests": {"storage": "1Gi"}}}
        self.put({**head, "metadata": metadata, "spec": spec, "status": {"phase": "Bound"}})
        if folder is not None:
            self.claims[name] = folder

    def pod_of(self, name: str, namespace: str, template: Object, **status: Any) -> None:
        """The pod that a controller would make of a template, owned by it."""
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "owner", "uid": "1", "controller": True}
        metadata = {**template["metadata"], "name": name, "namespace": namespace, "ownerReferences": [owner]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.put({**pod, "status": {"phase": "Running", **status}})

    def names(self, kind: str) -> list[str]:
        return sorted(name for each, _, name in self.objects if each == kind)

    def make_pod(self, namespace: str, name: str, template: Object) -> None:
        """Make a pod as a controller does. Raises: Refusal: 403: the namespace does not admit it."""
        check_pod(self._verbs.namespace(namespace), template, name)
        self.pod_of(name, namespace, template, phase="Pending")

    # ---- what an operator does, without HTTP ----

    def apply(self, obj: Object) -> str:
        """Take an object as from `kubectl apply`. Returns: "created", "configured" or "unchanged". Raises: Refusal."""
        kind = kind_of(obj)
        if kind is None or kind.api_version not in self.installed:
            raise refusal(404, "NotFound", f'no matches for kind "{obj["kind"]}" in version "{obj["apiVersion"]}"')
        key = key_of(obj)
        if key not in self.objects:
            self.answer("create", kind, key, obj)
            return "created"
        before = self.objects[key]
        _, after = self.answer("update", kind, key, {**before, **obj})
        return (
            "unchanged"
            if before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
            else "configured"
        )

    def answer(
        self, verb: str, kind: Kind, key: Key, body: Object, query: dict[str, str] | None = None
    ) -> tuple[int, Object]:
        """HTTP status and body. Raises: Refusal."""
        _, namespace, name = key
        return self.handle(Request(OPERATOR, verb, kind, namespace, name, "", query or {}, "application/json", body))

    # ---- requests ----

    def handle(self, request: Request) -> tuple[int, Object]:
        """HTTP status and body. Raises: Refusal."""
        self.enter(request)
        return self._verbs.answer(request)

    def watch(self, request: Request) -> Iterator[Object]:
        """The lines of a watch. Raises: Refusal, before the first one."""
        self.enter(request)
        return self._verbs.watch(request)

    def pod(self, request: Request) -> Object:
        """The pod of a log or a stream. Raises: Refusal."""
        self.enter(request)
        return self._verbs.existing(request)

    def exec(self, pod: Object, query: list[tuple[str, str]], stream: ServerSocket) -> None:
        """Run a command where the claims of the pod are."""
        limit = self.break_after.pop(0) if self.break_after else None
        run_command(pod, [text for name, text in query if name == "command"], self.claims, stream, limit)

    def forward(self, pod: str, port: int, stream: ServerSocket) -> None:
        """Connect a stream to what stands for a port of a pod."""
        number = port.to_bytes(2, "little")
        stream.send(b"\0" + number)
        stream.send(b"\1" + number)
        connect(self.ports[pod, port], stream)

    def log(self, name: str, query: dict[str, str]) -> str:
        """A pod's lines, stamped as the kubelet stamps them: a second apart."""
        lines = self.logs.get(f"{name}/previous" if query.get("previous") else name)
        if lines is None:
            raise refusal(400, "BadRequest", f'container in pod "{name}" is waiting to start')
        stamped = [f"2026-01-01T00:{i // 60:02}:{i % 60:02}.000000000Z {line}" for i, line in enumerate(lines)]
        since = query.get("sinceTime", "")[:19]
        newest = [line for line in stamped if line[:19] >= since][-int(query.get("tailLines", "100000")) :]
        return "".join(f"{line}\n" for line in newest)

    def _started(self, pod: Object) -> Object:
        volumes = [
            each["persistentVolumeClaim"]["claimName"]
            for each in pod["spec"].get("volumes", [])
            if "persistentVolumeClaim" in each
        ]
        missing = [name for name in volumes if name not in self.claims]
        if not missing:
            return {"phase": "Running"}
        message = f'persistentvolumeclaim "{missing[0]}" not found'
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        return {"phase": "Pending", "conditions": [condition]}
