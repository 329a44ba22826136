"""The Kubernetes side of a run: connection to the API, permissions, pods, and their troubles.

No failure here ends a run: a refused or unreachable API is reported once, and the run continues without it.
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
from coordinator.fleet.kubernetes.engines import engines
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
    """The cluster of a run: its pods, its rollout set and its troubles."""

    def __init__(self, config: RunConfig, api: KubeApi, pods: PodWatch, troubles: Troubles) -> None:
        self.settings = config.fleet
        self.api, self.pods = api, pods
        self.recorder = EventRecorder(api)
        self.noted = troubles
        self._replicas = config.rollout.replicas
        self._rollout_set = RolloutSet(kind=config.fleet.rollout_set_kind, name=config.fleet.rollout_set)

    async def start(self) -> None:
        """Check the permissions, start watching pods, and scale the rollout set."""
        await asyncio.to_thread(self._check_permissions)
        await asyncio.to_thread(self.pods.start, self.settings.request_timeout_s)
        if self.settings.scale:
            await asyncio.to_thread(self._scale)

    def troubles(self) -> list[str]:
        """List the troubles of the cluster now, as sentences."""
        self.look()
        return self.noted.all()

    def num_replicas(self) -> int | None:
        """Return how many replicas have pods that do not leave, pending ones included; None: the API is unreachable."""
        return sum(not pod.leaving for pod in engines(self.pods.pods)) if self.pods.is_current else None

    def look(self) -> None:
        """Update the troubles from the watch and the pods."""
        self.noted.note("watch", self.pods.trouble)
        pod_troubles = {f"pod/{pod.name}": f"pod {pod.name}: {pod.trouble}" for pod in self.pods.pods if pod.trouble}
        for about, text in pod_troubles.items():
            self.noted.note(about, text)
        self.noted.keep("pod/", pod_troubles)

    def close(self) -> None:
        """Stop watching; does not wait for the API server."""
        self.pods.stop()

    def _check_permissions(self) -> None:
        """Report all refused permissions together, at the start, instead of when each is needed."""
        try:
            missing = [item for item in self._needed() if not self.api.is_allowed(item, self._name_of(item))]
        except TandemError as error:
            log.warning("permission check failed", error=str(error))
            return
        if missing:
            refused = ", ".join(f"{permission} ({permission.without})" for permission in missing)
            self.noted.note(
                "permissions",
                f"Kubernetes RBAC refuses in namespace {self.api.namespace}: {refused}; see the Role in deploy/",
            )

    def _needed(self) -> list[Permission]:
        """List the permissions that these settings need."""
        unused: set[Permission] = set() if self.settings.max_evictions_per_hour else {permissions.EVICT_PODS}
        ours = self._rollout_set
        unused |= set() if self.settings.scale else {ours.get_scale, ours.patch_scale}
        return [permission for permission in ours.permissions if permission not in unused]

    def _name_of(self, permission: Permission) -> str:
        """Return the object that a permission is about, since a Role may be limited to it; "" for all."""
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
    """Connect to the cluster; nothing is read yet.

    Raises: ConfigError: no service account and no usable kubeconfig.
    """
    api_client, namespace = connect(config.fleet, environment.kube_namespace)
    api = KubeApi(api_client, namespace, timeout_s=config.fleet.request_timeout_s)
    return Cluster(config, api, PodWatch(api, selector(environment.run_id)), Troubles(events))


def connect(settings: FleetSection, namespace: str, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
    """Make a client of the API server. Returns: it, and the namespace of the run.

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
    # KubeApi retries, within deadlines and until it is closed; urllib3 would sleep as long as a Retry-After says.
    configuration.retries = False
    return client.ApiClient(configuration), own.strip()


def _namespace_of(file: str | None) -> str:
    """Read the namespace of the kubeconfig's current context."""
    _, current = kube_config.list_kube_config_contexts(config_file=file)
    return str(current["context"].get("namespace", "default"))
