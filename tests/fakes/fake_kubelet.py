"""A FAKE kubelet for tests: runs the pods of built manifests as containers of a real Docker engine.

It takes from a pod what a kubelet takes: image, command, environment (downward API, secrets), user, read-only root,
capabilities, sysctls, volumes, the token of its service account, limits, probes, grace period. With `join` pods reach
an API server, which knows them and their states. It does not evict a pod whose emptyDir grows beyond its limit. It has
no scheduler and no controllers (nothing is started again), enforces no NetworkPolicy, and names pods by Docker's DNS.
What runs here has not run on Kubernetes.
"""

import base64
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.images.engine import Engine
from tests.manifests.kustomize import Manifest, containers, find, kinds, pod_template, workloads

PROBE_S = 2.0
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
UNITS = {"Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod. names: under which others reach it."""

    name: str
    ip: str
    names: Sequence[str]
    namespace: str
    labels: dict[str, str]
    template: Manifest

    @property
    def spec(self) -> Manifest:
        """The pod's spec."""
        return dict(self.template["spec"])

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (found,) = containers(self.template)
        return found


class FakeKubelet:
    """The pods of a namespace, on a network of their own. Claims are folders below `folder`.

    Args:
        subnet: the first three numbers of addresses for pods, "10.89.7".
    Attributes:
        gateway: the address at which pods reach this process.
    """

    def __init__(self, engine: Engine, manifests: Sequence[Manifest], folder: Path, name: str, subnet: str) -> None:
        self._engine, self._manifests, self._folder, self._name = engine, manifests, folder, name
        self.pods = {pod.name: pod for pod in _pods(manifests, subnet)}
        self.gateway = f"{subnet}.1"
        self._api: FakeCluster | None = None
        self._authority = ""
        engine.run("network", "create", "--subnet", f"{subnet}.0/24", name)

    def join(self, api: FakeCluster, authority: str) -> None:
        """Pods know this API server, and it knows those that are started from now on. authority: its own, as PEM."""
        self._api, self._authority = api, authority

    def report(self) -> bool:
        """Tells the API server what has become of the pods. Returns: True, for use in a wait."""
        assert self._api is not None
        for obj in self._api.list_of("Pod"):
            name = obj["metadata"]["name"]
            phase, ready = "Running", False
            if self.is_running(name):
                ready = self._answers(name, "readinessProbe")  # not if it ends meanwhile
            else:
                phase = "Failed" if self.exit_code(name) else "Succeeded"
            conditions = [{"type": "Ready", "status": str(ready)}]
            status = {"phase": phase, "podIP": self.pods[name].ip, "conditions": conditions}
            if obj["status"] != status:
                self._api.put({**obj, "status": status})
        return True

    def start(self, name: str) -> None:
        """Starts a pod's container."""
        pod = self.pods[name]
        if self._api is not None:
            self._api.make_pod(pod.namespace, name, {**pod.template, "metadata": {"labels": pod.labels}})
        container = pod.container
        command = [*container["command"], *container.get("args", [])]
        environ = self._environment(pod)
        command = [expanded(word, environ) for word in command]
        options = ["--network", self._name, "--ip", pod.ip, "--hostname", pod.name, "--name", self._container(name)]
        options += [word for alias in pod.names for word in ("--network-alias", alias)]
        options += [word for key, value in environ.items() for word in ("--env", f"{key}={value}")]
        options += [*self._security(pod), *self._volumes(pod)]
        self._engine.run(
            "run", "--detach", *options, "--entrypoint", command[0], container["image"], *command[1:], timeout_s=120
        )

    def succeeds(self, name: str, probe: str) -> bool:
        """Asks once, as the kubelet does. Raises: AssertionError: the container has ended."""
        assert self.is_running(name), f"{name} has ended: {self.logs(name)}"
        return self._answers(name, probe)

    def _answers(self, name: str, probe: str) -> bool:
        pod = self.pods[name]
        how = pod.container[probe]
        if "exec" in how:
            command = [self._engine.docker, "exec", self._container(name), *how["exec"]["command"]]
            return subprocess.run(command, env=self._engine.environ, capture_output=True, check=False).returncode == 0
        with grpc.insecure_channel(f"{pod.ip}:{how['grpc']['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=how["grpc"]["service"])
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_S)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def is_running(self, name: str) -> bool:
        return self._engine.run("inspect", "--format", "{{.State.Running}}", self._container(name)).strip() == "true"

    def exit_code(self, name: str) -> int:
        """Of a container that has ended."""
        return int(self._engine.run("inspect", "--format", "{{.State.ExitCode}}", self._container(name)))

    def terminate(self, name: str) -> int:
        """SIGTERM, and SIGKILL after the pod's grace period. Returns: the exit code."""
        grace_s = self.pods[name].spec["terminationGracePeriodSeconds"]
        self._engine.run("stop", "--time", str(grace_s), self._container(name), timeout_s=grace_s + 60)
        return self.exit_code(name)

    def logs(self, name: str, *, whole: bool = False) -> str:
        """A container's output, or the end of it."""
        lines = [] if whole else ["--tail", "30"]
        command = [self._engine.docker, "logs", *lines, self._container(name)]
        done = subprocess.run(command, env=self._engine.environ, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr) if whole else (done.stdout + done.stderr)[-4000:]

    def claim(self, name: str) -> Path:
        """The folder behind a PersistentVolumeClaim."""
        return self._folder / "claims" / name

    def close(self) -> None:
        """Removes the containers and the network."""
        there = self._engine.run("ps", "--all", "--quiet", "--filter", f"network={self._name}").split()
        if there:
            self._engine.run("rm", "--force", *there, timeout_s=120)
        self._engine.run("network", "rm", self._name)

    def _container(self, pod: str) -> str:
        return f"{self._name}-{pod}"

    def _environment(self, pod: Pod) -> dict[str, str]:
        made: dict[str, str] = {}
        if self._api is not None:
            made = {"KUBERNETES_SERVICE_HOST": self.gateway, "KUBERNETES_SERVICE_PORT": str(self._api.port)}
        for entry in pod.container.get("env", []):
            # Of what comes before in the list; the rest stays as it is written.
            made[entry["name"]] = expanded(self._value(entry, pod), made)
        return made

    def _value(self, entry: Manifest, pod: Pod) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            return self._data("Secret", source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
        path = source["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        if label is not None:
            return pod.labels[label[1]]
        return {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "status.podIPs": pod.ip}[path]

    def _data(self, kind: str, name: str) -> dict[str, str]:
        """The entries of a ConfigMap or Secret. Raises: AssertionError: it is not in the manifests."""
        (found,) = [each for each in kinds(self._manifests, kind) if each["metadata"]["name"] == name]
        if kind == "ConfigMap":
            return dict(found["data"])
        return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}

    def _security(self, pod: Pod) -> list[str]:
        context, limits = pod.spec["securityContext"], pod.container["resources"]["limits"]
        options = ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
        options += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--memory", str(_bytes(limits["memory"]))]
        for sysctl in context.get("sysctls", []):
            options += ["--sysctl", f"{sysctl['name']}={sysctl['value']}"]
        return options

    def _volumes(self, pod: Pod) -> list[str]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        options = []
        for mount in pod.container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                size = _bytes(volume["emptyDir"]["sizeLimit"])
                if path == "/dev/shm":
                    options += ["--shm-size", str(size)]
                else:
                    options += ["--volume", f"{self._scratch(str(volume['name']), pod)}:{path}:rw"]
            else:
                mode = "ro" if mount.get("readOnly") else "rw"
                options += ["--volume", f"{self._folder_of(volume, pod)}:{path}:{mode}"]
        if self._api is not None and pod.spec.get("automountServiceAccountToken", True):
            folder, token = self._folder / "accounts" / pod.name, self._api.tokens[pod.spec["serviceAccountName"]]
            _write(folder, {"token": token, "ca.crt": self._authority, "namespace": pod.namespace})
            options += ["--volume", f"{folder}:{ACCOUNT}:ro"]
        return options

    def _scratch(self, name: str, pod: Pod) -> Path:
        """An emptyDir: a folder of the node's disk, for everybody to write and execute, as the kubelet makes it."""
        folder = self._folder / "scratch" / pod.name / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, pod.spec["securityContext"]["fsGroup"])
        folder.chmod(0o2777)
        return folder

    def _folder_of(self, volume: Manifest, pod: Pod) -> Path:
        if "persistentVolumeClaim" in volume:
            folder = self.claim(volume["persistentVolumeClaim"]["claimName"])
            folder.mkdir(parents=True, exist_ok=True)
            # As the kubelet does for fsGroup.
            chown(folder, pod.spec["securityContext"]["fsGroup"])
            return folder
        folder = self._folder / "volumes" / pod.name / str(volume["name"])
        kind, source = ("Secret", volume["secret"]["secretName"]) if "secret" in volume else _config_map(volume)
        _write(folder, self._data(kind, source))
        return folder


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """A text with $(NAME) as the kubelet takes it: a name that is not defined yet stays.

    >>> expanded("/run/$(ID)/$(LATER)", {"ID": "a"})
    '/run/a/$(LATER)'
    """
    return re.sub(r"\$\((\w+)\)", lambda match: environ.get(match[1], match[0]), text)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def chown(folder: Path, group: int) -> None:
    """Group-writable for a pod's fsGroup. Needs root."""
    os.chown(folder, 0, group)
    folder.chmod(0o2775)


def _config_map(volume: Manifest) -> tuple[str, str]:
    return "ConfigMap", volume["configMap"]["name"]


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def _pods(manifests: Sequence[Manifest], subnet: str) -> Iterator[Pod]:
    """The pods that the controllers would make: rollout-0, rollout-1, ...; a Job's pod has the Job's name here."""
    addresses = (f"{subnet}.{number}" for number in range(10, 250))
    for workload in workloads(manifests):
        template, name = pod_template(workload), workload["metadata"]["name"]
        labels: dict[str, Any] = template["metadata"]["labels"]
        namespace = workload["metadata"]["namespace"]
        if workload["kind"] == "Job":
            yield Pod(
                name=name, ip=next(addresses), names=[name], namespace=namespace, labels=labels, template=template
            )
            continue
        service = find(manifests, "Service", workload["spec"]["serviceName"])["metadata"]["name"]
        for index in range(workload["spec"]["replicas"]):
            own = {**labels, "apps.kubernetes.io/pod-index": str(index)}
            names = [f"{name}-{index}.{service}", service]
            yield Pod(
                name=f"{name}-{index}",
                ip=next(addresses),
                names=names,
                namespace=namespace,
                labels=own,
                template=template,
            )
