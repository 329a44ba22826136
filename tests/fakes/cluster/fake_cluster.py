"""A FAKE cluster for what an operator's machine calls: the REST of all kinds, logs, exec, port-forward, discovery.

HTTP on loopback, objects in memory. Real kubectl creates objects in it (`kubectl apply -k` of what is not there yet).
What it does beyond storing:

    dryRun=All     answers, stores nothing
    PodSecurity    `enforce: restricted` of a namespace: the rules that our pods could break (admission.py)
    PUT            422 where it changes fields of Jobs and StatefulSets that are immutable
    pods           created ones run immediately, if their claims exist; deleted ones are gone immediately, and with
                   them what they own is not: there are no controllers, a test makes the pods of sets itself
    exec           runs the command on this machine, with the paths of the pod's claims replaced by their folders
    port-forward   connects to `ports`

It has no scheduler, no controllers, no server-side or strategic merge (PATCH is 415), no RBAC but what `refuse` names.
Nothing that runs against it has run on Kubernetes.
"""

import copy
import json
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.fakes.cluster.admission import admit, update_refusal, validate
from tests.fakes.cluster.http import BUILT_IN, TOKEN, Handler, Key
from tests.fakes.cluster.websocket_frames import CLOSE, ServerSocket
from tests.fakes.fake_kube_store import Object, not_found, now, refusal


class FakeCluster:
    """A fake cluster in threads of this process; a context manager.

    Attributes:
        claims: folders of claims, by name; a pod that mounts another one stays Pending.
        logs: lines of a pod, without times.
        ports: (pod, port) -> address on this machine.
        break_after: bytes after which the next execs lose their connection, one entry per exec.
        seen: requests by "verb plural".
    """

    def __init__(self, *namespaces: str) -> None:
        self.objects: dict[Key, Object] = {}
        self.claims: dict[str, Path] = {}
        self.logs: dict[str, list[str]] = {}
        self.ports: dict[tuple[str, int], tuple[str, int]] = {}
        self.break_after: list[int] = []
        self.seen: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.installed = set(BUILT_IN)
        self._lock = threading.RLock()
        self._version = 100
        handler = type("Handler", (Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake-cluster")
        for name in namespaces:
            self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def __enter__(self) -> "FakeCluster":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "users": [{"name": "fake", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    # ---- what a test, a controller or a kubelet does ----

    def put(self, obj: Object) -> Object:
        """Create or replace an object, status included, unchecked."""
        with self._lock:
            self._version += 1
            kept = copy.deepcopy(obj)
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now(), **kept["metadata"]}
            kept["metadata"] = metadata | {"resourceVersion": str(self._version)}
            self.objects[obj["kind"], metadata.get("namespace", ""), metadata["name"]] = kept
            return copy.deepcopy(kept)

    def node(self, name: str, gpus: int, *taints: str, **labels: str) -> None:
        """A node with 96 CPUs, 900 GiB and so many GPUs; taints as key:effect."""
        allocatable = {"cpu": "96", "memory": "943718400Ki"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        spec = {"taints": [dict(zip(("key", "effect"), each.split(":"), strict=True)) for each in taints]}
        head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.put({**head, "spec": spec, "status": {"allocatable": allocatable}})

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

    def refuse(self, what: str, message: str = "") -> None:
        """RBAC or an admission webhook: `create pods` is forbidden from now on."""
        self.refused[what] = message

    # ---- requests ----

    def answer(
        self, verb: str, kind: str, key: Key, plural: str, query: dict[str, str], body: Object
    ) -> tuple[int, Object]:
        what = f"{verb} {plural}"
        self.seen[what] += 1
        if what in self.refused:
            default = f'User "operator" cannot {verb} resource "{plural}" in API group "" in the namespace "{key[1]}"'
            raise refusal(403, "Forbidden", f'{plural} "{key[2]}" is forbidden: {self.refused[what] or default}')
        with self._lock:
            match verb:
                case "list":
                    return 200, self._list(kind, key[1], query)
                case "get":
                    return 200, copy.deepcopy(self.existing(key, plural))
                case "create":
                    return 201, self._create(kind, key, plural, query, body)
                case "delete":
                    self.existing(key, plural)
                    del self.objects[key]
                    self._collect(key)
                    return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
                case "update":
                    if why := update_refusal(self.existing(key, plural), body):
                        raise refusal(422, "Invalid", f'{kind} "{key[2]}" is invalid: {why}')
                    return 200, self.put(body)
        raise refusal(405, "MethodNotAllowed", f"the fake cluster does not {verb}")

    def exec(self, pod: Object, query: list[tuple[str, str]], stream: ServerSocket) -> None:
        """Run a command where the claims of the pod are."""
        mounts = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0].get("volumeMounts", [])}
        folders = {
            mounts[volume["name"]]: str(self.claims[volume["persistentVolumeClaim"]["claimName"]])
            for volume in pod["spec"].get("volumes", [])
            if volume["name"] in mounts and "persistentVolumeClaim" in volume
        }
        command = [text for name, text in query if name == "command"]
        command = [
            sys.executable if index == 0 and text == "python" else _local(text, folders)
            for index, text in enumerate(command)
        ]
        limit = self.break_after.pop(0) if self.break_after else None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False)
        errors = threading.Thread(target=_relay, args=(process.stderr, 2, stream, None))
        errors.start()
        if not _relay(process.stdout, 1, stream, limit):
            process.kill()  # and the connection ends without a close frame, as by a proxy that restarts
            process.wait()
            return
        errors.join()
        code = process.wait()
        status: Object = {"metadata": {}, "status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            text = f"command terminated with non-zero exit code: exit code {code}"
            status |= {"status": "Failure", "reason": "NonZeroExitCode", "message": text, "details": {"causes": causes}}
        stream.send(b"\3" + json.dumps(status).encode())
        stream.send(b"\x03\xe8", CLOSE)

    def forward(self, pod: str, port: int, stream: ServerSocket) -> None:
        """Connect a stream to what stands for a port of a pod."""
        number = port.to_bytes(2, "little")
        stream.send(b"\0" + number)
        stream.send(b"\1" + number)
        with socket.create_connection(self.ports[pod, port], timeout=10.0) as target:
            target.settimeout(None)
            back = threading.Thread(target=_answers, args=(target, stream), daemon=True)
            back.start()
            while (data := stream.receive()) is not None:
                target.sendall(data[1:])

    def log(self, name: str, query: dict[str, str]) -> str:
        """A pod's lines, stamped as the kubelet stamps them: a second apart."""
        lines = self.logs.get(f"{name}/previous" if query.get("previous") else name)
        if lines is None:
            raise refusal(400, "BadRequest", f'container in pod "{name}" is waiting to start')
        stamped = [f"2026-01-01T00:{i // 60:02}:{i % 60:02}.000000000Z {line}" for i, line in enumerate(lines)]
        since = query.get("sinceTime", "")[:19]
        newest = [line for line in stamped if line[:19] >= since][-int(query.get("tailLines", "100000")) :]
        return "".join(f"{line}\n" for line in newest)

    def existing(self, key: Key, plural: str) -> Object:
        if key not in self.objects:
            raise not_found((plural, key[1], key[2]))
        return self.objects[key]

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> Object:
        wanted = dict(each.split("=") for each in query.get("labelSelector", "").split(",") if each)
        found = [
            copy.deepcopy(obj)
            for (each, where, _), obj in sorted(self.objects.items())
            if each == kind
            and namespace in ("", where)
            and wanted.items() <= (obj["metadata"].get("labels") or {}).items()
        ]
        first, limit = int(query.get("continue", "0")), int(query.get("limit", "1000"))
        more = {"continue": str(first + limit)} if first + limit < len(found) else {}
        head = {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._version), **more}}
        return {**head, "items": found[first : first + limit]}

    def _create(self, kind: str, key: Key, plural: str, query: dict[str, str], body: Object) -> Object:
        namespace = key[1]
        if namespace and ("Namespace", "", namespace) not in self.objects:
            raise not_found(("namespaces", "", namespace))
        key = kind, namespace, str(body["metadata"]["name"])
        if key in self.objects:
            raise refusal(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
        body = {**body, "metadata": {**body["metadata"], **({"namespace": namespace} if namespace else {})}}
        validate(kind, body)
        if kind == "Pod":
            admit(self.objects["Namespace", "", namespace], body)
            body["status"] = self._started(body)
        return body if query.get("dryRun") == "All" else self.put(body)

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

    def _collect(self, key: Key) -> None:
        """The garbage collector, of pods of a set or a Job of the test."""
        if key[0] in ("Job", "StatefulSet"):
            prefix = f"{key[2]}-"
            for each in [
                one for one in self.objects if one[0] == "Pod" and one[1] == key[1] and one[2].startswith(prefix)
            ]:
                del self.objects[each]


def _local(text: str, folders: dict[str, str]) -> str:
    """A path of the pod as a path of this machine; a program's text stays."""
    for mount, folder in folders.items():
        if text == mount or text.startswith(f"{mount}/"):
            return folder + text[len(mount) :]
    return text


def _relay(pipe: Any, channel: int, stream: ServerSocket, limit: int | None) -> bool:
    """Send what a pipe has. Returns: False: `limit` bytes were sent before its end."""
    sent = 0
    while data := pipe.read1(1 << 16):
        if limit is not None and sent + len(data) > limit:
            stream.send(bytes([channel]) + data[: limit - sent])
            return False
        stream.send(bytes([channel]) + data)
        sent += len(data)
    return True


def _answers(target: socket.socket, stream: ServerSocket) -> None:
    try:
        while data := target.recv(1 << 16):
            stream.send(b"\0" + data)
        stream.send(b"\x03\xe8", CLOSE)
    except OSError:
        return
