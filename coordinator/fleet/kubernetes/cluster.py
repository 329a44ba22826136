"""The Kubernetes side of a run: how to reach the API, what it lets us do, the pods, and what is wrong with them.

Nothing here ends a run: what is refused or away is said once, and the run goes on with what it has.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes import config as kube_config

from coordinator.fleet.kubernetes.api import permissions
from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.events import About, EventRecorder
from coordinator.fleet.kubernetes.api.permissions import Permission
from coordinator.fleet.kubernetes.api.pods import selector
from coordinator.fleet.kubernetes.api.rollout_set import RolloutSet
from coordinator.fleet.kubernetes.api.watch import PodWatch
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.watch.events import EventLog
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, TandemError
from servicekit.logs import get_logger
from tandem_config.schema import FleetSection, RunConfig

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_IN_A_POD = "KUBERNETES_SERVICE_HOST"

log = get_logger(__name__)


class Cluster:
    """What a run knows of its cluster and does to it."""

    def __init__(self, config: RunConfig, api: KubeApi, pods: PodWatch, troubles: Troubles) -> None:
        self.settings = config.fleet
        self.api, self.pods = api, pods
        self.recorder = EventRecorder(api)
        self.noted = troubles
        self._replicas = config.rollout.replicas
        self._rollout_set = RolloutSet(kind=config.fleet.rollout_set_kind, name=config.fleet.rollout_set)

    async def start(self) -> None:
        """Find out what we may do, begin to watch, and give the rollout set its size."""
        await asyncio.to_thread(self._check_permissions)
        await asyncio.to_thread(self.pods.start, self.settings.request_timeout_s)
        if self.settings.scale:
            await asyncio.to_thread(self._scale)

    def troubles(self) -> list[str]:
        """What is wrong now, in words."""
        self.look()
        return self.noted.all()

    def look(self) -> None:
        """Bring the troubles up to date with the pods."""
        self.noted.note("watch", self.pods.trouble)
        ill = {f"pod/{pod.name}": f"pod {pod.name}: {pod.trouble}" for pod in self.pods.pods if pod.trouble}
        for about, text in ill.items():
            self.noted.note(about, text)
        self.noted.keep("pod/", ill)

    def close(self) -> None:
        """Stop watching; waits for nobody."""
        self.pods.stop()

    def _check_permissions(self) -> None:
        """Say at once, and once, what is refused: later it would fail one by one, when it is needed."""
        try:
            missing = [each for each in self._needed() if not self.api.is_allowed(each, self._name_of(each))]
        except TandemError as error:
            log.warning("permissions could not be checked", error=str(error))
            return
        if missing:
            told = ", ".join(f"{each} ({each.without})" for each in missing)
            self.noted.note(
                "permissions",
                f"Kubernetes RBAC refuses in namespace {self.api.namespace}: {told}; see the Role in deploy/",
            )

    def _needed(self) -> list[Permission]:
        """Of what we may need, what the settings ask for."""
        unused: set[Permission] = set() if self.settings.max_evictions_per_hour else {permissions.EVICT_PODS}
        ours = self._rollout_set
        unused |= set() if self.settings.scale else {ours.get_scale, ours.patch_scale}
        return [each for each in ours.permissions if each not in unused]

    def _name_of(self, permission: Permission) -> str:
        """Roles may limit a permission to one object."""
        ours = self._rollout_set
        return ours.name if permission in (ours.get_scale, ours.patch_scale) else ""

    def _scale(self) -> None:
        ours, replicas = self._rollout_set, self._replicas
        try:
            before = self.api.scale(ours, replicas)
        except TandemError as error:
            self.noted.note("scale", f"the rollout set keeps its size: {error}")
            return
        if before != replicas:
            log.info("rollout set scaled", name=ours.name, before=before, replicas=replicas)
            message = f"from {before} to {replicas} replicas (rollout.replicas)"
            self.recorder.record(About.rollout_set(ours), "TandemScaled", message)


def reach_cluster(config: RunConfig, environment: ServiceEnvironment, events: EventLog) -> Cluster:
    """The cluster, not looked at yet.

    Raises: ConfigError: there is no way to the API: neither a service account nor a kubeconfig that can be used.
    """
    api_client, namespace = connect(config.fleet, environment.kube_namespace)
    api = KubeApi(api_client, namespace, timeout_s=config.fleet.request_timeout_s)
    return Cluster(config, api, PodWatch(api, selector(environment.run_id)), Troubles(events))


def connect(settings: FleetSection, namespace: str, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
    """A client of the API server, and the namespace of the run.

    Raises: ConfigError: no service account, no usable kubeconfig.
    """
    configuration = client.Configuration()
    in_a_pod = settings.kubeconfig is None and _IN_A_POD in environ
    file = None if settings.kubeconfig is None else str(settings.kubeconfig)
    try:
        if in_a_pod:
            kube_config.load_incluster_config(client_configuration=configuration)
            own = namespace or _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8")
        else:
            kube_config.load_kube_config(config_file=file, client_configuration=configuration)
            own = namespace or _namespace_of(file)
    except (kube_config.ConfigException, OSError) as error:
        where = "the pod's service account" if in_a_pod else f"the kubeconfig {file or '(KUBECONFIG, ~/.kube/config)'}"
        raise ConfigError(
            f"fleet.kind: kubernetes, but {where} cannot be used: {error}; set fleet.kubeconfig, or run in a pod with "
            "automountServiceAccountToken"
        ) from error
    # Ours honours deadlines and the end of the process; urllib3's would sleep for as long as a Retry-After says.
    configuration.retries = False
    return client.ApiClient(configuration), own.strip()


def _namespace_of(file: str | None) -> str:
    """Of the kubeconfig's current context."""
    _, current = kube_config.list_kube_config_contexts(config_file=file)
    return str(current["context"].get("namespace", "default"))
