"""The Kubernetes side of a run: connection to the API, permissions, pods, and their troubles.

No failure here ends a run: a refused or unreachable API is reported once, and the run continues without it.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes import config as kube_config

from coordinator.fleet.kubernetes.api import permissions
from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.events import About, EventRecorder
from coordinator.fleet.kubernetes.api.permissions import Permission
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import TRAINER, Pod, PodOutlook, selector
from coordinator.fleet.kubernetes.api.watch import PodWatch
from coordinator.fleet.kubernetes.placement import RoomForTrainer
from coordinator.fleet.kubernetes.pod_states import engines, queue_of, trainer_outlook
from coordinator.fleet.kubernetes.size import RolloutSize
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.watch.events import EventLog
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, NotReady, TandemError
from servicekit.lifecycle.termination import watch
from servicekit.logs import get_logger
from tandem_config.schema import FleetSection, RunConfig

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_IN_A_POD = "KUBERNETES_SERVICE_HOST"
# Longest time of a request to the API: a server that is up answers within one second.
REQUEST_TIMEOUT_S = 10.0
# Between two looks at a set without pods.
SET_INTERVAL_S = 5.0

log = get_logger(__name__)


class Cluster:
    """The cluster of a run: its pods, its rollout set and its troubles."""

    def __init__(
        self,
        config: RunConfig,
        api: KubeApi,
        pods: PodWatch,
        troubles: Troubles,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = config.fleet
        self.api, self.pods = api, pods
        self.recorder = EventRecorder(api)
        self.noted = troubles
        self._clock = clock
        self._suspended = False
        self._next_look_s = 0.0
        self.rollout_set = PodSet(kind=config.fleet.rollout_set_kind, name=config.fleet.rollout_set)
        self.trainer_set = PodSet(kind=config.fleet.trainer_set_kind, name=config.fleet.trainer_set)
        self._placement = RoomForTrainer(api, pods, troubles, self.rollout_set, folder, clock=clock)
        self._size = RolloutSize(
            api,
            troubles,
            self.rollout_set,
            folder,
            configured=config.rollout.replicas,
            scales=config.fleet.scale,
            num_pods=lambda: len(engines(self.pods.pods)) if self.pods.is_current else None,
            is_emptied=lambda: self._placement.size_before is not None,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._looks_on = False

    async def look_on(self) -> None:
        """Check the permissions, and start watching pods; a standby does this, which changes nothing."""
        await asyncio.to_thread(self._check_permissions)
        await asyncio.to_thread(self.pods.start, REQUEST_TIMEOUT_S)
        self._looks_on = True

    async def start(self) -> None:
        """Look on, if that was not begun; set the rollout set's size; then watch it, and make room for the trainer."""
        if not self._looks_on:
            await self.look_on()
        await asyncio.to_thread(self._placement.recall)
        if self.settings.scale or self.settings.release_after_s is not None:
            if self.pods.is_current:  # else later: tries of an API that does not answer take most of a minute
                await self._size.look()
            self._begin("size", self._size.run(), "the rollout set's size is not watched any more")
        self._begin("placement", self._placement.run(), "no room is made any more")

    def _begin(self, about: str, work: Coroutine[Any, Any, None], what: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=about))
        watch(self._tasks[-1], lambda error: self.noted.note(about, f"{what}: {error}"))

    def troubles(self) -> list[str]:
        """List the troubles of the cluster now, as sentences."""
        self.look()
        return self.noted.all()

    def num_replicas(self) -> int | None:
        """Return how many replicas have pods, pending ones included; None: the API is unreachable.

        Without those that leave, but with those of them that are in trouble: no successor comes.
        """
        if not self.pods.is_current:
            return None
        return sum(not pod.leaving or bool(pod.trouble) for pod in engines(self.pods.pods))

    def look(self) -> None:
        """Update the troubles from the watch and the pods."""
        self.noted.note("watch", self.pods.trouble)
        pods = self.pods.pods
        self.noted.note("queue", queue_of(pods))
        in_trouble = [pod for pod in pods if pod.trouble and pod.outlook is not PodOutlook.QUEUED]
        pod_troubles = {f"pod/{pod.name}": f"pod {pod.name}: {pod.trouble}{self._patience(pod)}" for pod in in_trouble}
        for about, text in pod_troubles.items():
            self.noted.note(about, text)
        self.noted.keep("pod/", pod_troubles)

    def _patience(self, pod: Pod) -> str:
        """Say how long the run waits for a pod that it needs; "" for others."""
        waits = pod.component == TRAINER and pod.outlook is PodOutlook.COMING
        return f"; waited for, fleet.reschedule_timeout_s = {self.settings.reschedule_timeout_s:g} s" if waits else ""

    def trainer_outlook(self) -> tuple[PodOutlook, str]:
        """Judge the trainer by its pods, and by its set where that has made none."""
        outlook, reason = trainer_outlook(self.pods.pods)
        if self._suspended and outlook is PodOutlook.COMING and not self._has_trainer_pods():
            return PodOutlook.QUEUED, f"{self.trainer_set} is suspended: it is queued"
        return outlook, reason

    def look_at_trainer_set(self) -> None:
        """Find out whether a JobSet without pods is suspended. Blocking; asks the API every SET_INTERVAL_S at most."""
        if self.trainer_set.kind != "JobSet" or self._has_trainer_pods():
            self._suspended = False
        elif self._clock() >= self._next_look_s:
            self._next_look_s = self._clock() + SET_INTERVAL_S
            try:
                self._suspended = self.api.is_suspended(self.trainer_set)
            except TandemError as error:
                log.warning("trainer set not read", pod_set=str(self.trainer_set), error=str(error))
        queued = f"{self.trainer_set} is suspended: the run waits as long as it is queued" if self._suspended else ""
        self.noted.note("trainer set", queued)

    def has_queued_replicas(self) -> bool:
        """Whether pods of replicas are held in a queue, or taken away for the trainer, as far as the watch knows."""
        if not self.pods.is_current:
            return False
        rollouts = [pod for pod in self.pods.pods if pod.component != TRAINER]
        return self._placement.is_waiting or any(pod.outlook is PodOutlook.QUEUED for pod in rollouts)

    def _has_trainer_pods(self) -> bool:
        return any(pod.component == TRAINER for pod in self.pods.pods)

    def close(self) -> None:
        """Stop watching; does not wait for the API server."""
        for task in self._tasks:
            task.cancel()
        self.pods.stop()

    def release(self, why: str) -> None:
        """Give the GPUs of the run back: scale its sets to 0, delete one that has no scale. Blocking.

        What is refused is a trouble, and in the log.
        """
        for pod_set in (self.rollout_set, self.trainer_set):
            try:
                before = self._empty(pod_set)
            except NotReady as error:
                log.warning("no set to take gpus from", pod_set=str(pod_set), error=str(error))
                continue
            except TandemError as error:
                self.noted.note(f"release/{pod_set}", f"{pod_set} keeps its GPUs: {error}")
                continue
            if before:
                log.info("gpus released", pod_set=str(pod_set), why=why, before=before)
                self.recorder.record(About.pod_set(pod_set), "TandemReleased", f"{before}, now none: {why}")

    def _empty(self, pod_set: PodSet) -> str:
        """Take all pods from a set, for good. Returns: its size before, as text; "" if it had none."""
        self._placement.forget()
        if pod_set.has_scale:
            before = self.api.scale(pod_set, 0)
            return f"{before} replicas" if before else ""
        self.api.delete(pod_set)
        return "deleted"

    def _check_permissions(self) -> None:
        """Report all refused permissions together, at the start, instead of when each is needed."""
        try:
            missing = [permission for permission, name in self._needed() if not self.api.is_allowed(permission, name)]
        except TandemError as error:
            log.warning("permission check failed", error=str(error))
            return
        if missing:
            refused = ", ".join(f"{permission} ({permission.without})" for permission in missing)
            self.noted.note(
                "permissions",
                f"Kubernetes RBAC refuses in namespace {self.api.namespace}: {refused}; see the Role in deploy/",
            )

    def _needed(self) -> list[tuple[Permission, str]]:
        """List the permissions that these settings need, each with the object that it is about, "" for all."""
        settings, rollout, trainer = self.settings, self.rollout_set, self.trainer_set
        unused: set[Permission] = set() if settings.max_evictions_per_hour else {permissions.EVICT_PODS}
        needed = [(permission, "") for permission in permissions.PERMISSIONS if permission not in unused]
        releases = settings.release_after_s is not None
        if settings.scale or releases:
            needed += [(permission, rollout.name) for permission in (*rollout.permissions, rollout.get)]
        if releases:
            needed += [(permission, trainer.name) for permission in trainer.permissions]
        return needed


def reach_cluster(config: RunConfig, environment: ServiceEnvironment, events: EventLog) -> Cluster:
    """Connect to the cluster; nothing is read yet.

    Raises: ConfigError: no service account and no usable kubeconfig.
    """
    api_client, namespace = connect(config.fleet, environment.kube_namespace)
    api = KubeApi(api_client, namespace, timeout_s=REQUEST_TIMEOUT_S)
    if environment.rollout_set:
        config = config.changed("fleet", rollout_set=environment.rollout_set)
    if environment.trainer_set:
        config = config.changed("fleet", trainer_set=environment.trainer_set)
    return Cluster(config, api, PodWatch(api, selector(environment.run_id)), Troubles(events), environment.run_dir)


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
