"""Decides from the state of the pods whether to wait for a service that is not announced, and how long.

trainer pods             a trainer that is not announced
starting, rescheduled    is waited for, up to fleet.reschedule_timeout_s: the cluster restarts it
queued, or of a JobSet   is waited for as long as it is queued; the other times begin when it is no longer
that is suspended
dead                     ends the wait: a person must act
unknown                  is waited for, up to run.startup_timeout_s

A run that has not begun waits for all of rollout.replicas whose pods are starting, up to run.startup_timeout_s: its
first iteration begins with those that are present. Replicas that are unschedulable or cannot start are not waited for,
but at least rollout.min_replicas are needed: while so many may still come, they are waited for as long as a trainer is.
Later ones are seeded when they come.
"""

import math
import time
from collections.abc import Callable, Sequence

from coordinator.fleet.arrivals import AnnouncedServices, Outlook
from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.pod_states import engines
from servicekit.errors import Unavailable
from tandem_config.schema import RunConfig


class TrainerDead(Unavailable):
    """The trainer's pods cannot start without a person's help."""


class ClusterOutlook(Outlook):
    """Of services in pods; each question updates the cluster's troubles. For one wait, which begins with it."""

    def __init__(self, config: RunConfig, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._cluster, self._clock = config, cluster, clock
        self._begun_s = clock()
        # How long after the begin of the wait what is needed was last seen in a queue.
        self._queued_s = 0.0

    def update(self, announced: AnnouncedServices) -> None:
        """Ask whether a trainer without pods is in a queue: a JobSet in one is suspended, and has none."""
        if not announced.trainers:
            self._cluster.look_at_trainer_set()

    def may_come(self, announced: AnnouncedServices) -> bool:
        """Whether another replica is starting, or its pods are not known."""
        self._cluster.look()
        missing = _missing(announced, self._cluster.pods.pods)
        return not self._cluster.pods.is_current or any(
            pod.outlook is not PodOutlook.DEAD and not pod.trouble for pod in missing
        )

    def patience_s(self, announced: AnnouncedServices) -> float:
        """Return run.startup_timeout_s, or longer for pods that may still come; without end while some are queued.

        Raises: TrainerDead: with the troubles of its pods.
        """
        self._cluster.look()
        longer_s = self._longest_s(announced) if self._cluster.pods.is_current else 0.0
        return self._queued_s + max(self._config.run.startup_timeout_s, longer_s)

    def troubles(self, announced: AnnouncedServices) -> list[str]:
        """Return those of the trainer's pods, if it is missing, and the cluster's."""
        pods = self._cluster.pods
        trainer = self._cluster.trainer_outlook()[1] if not announced.trainers and pods.is_current else ""
        return list(dict.fromkeys([*([trainer] if trainer else []), *self._cluster.troubles()]))

    def _longest_s(self, announced: AnnouncedServices) -> float:
        pods, rollout = self._cluster.pods.pods, self._config.rollout
        outlook, reason = (PodOutlook.UP, "") if announced.trainers else self._cluster.trainer_outlook()
        if outlook is PodOutlook.DEAD:
            raise TrainerDead(f"the trainer is dead, waiting would not help: {reason}")
        missing = _missing(announced, pods)
        needed = rollout.min_replicas - len(announced.rollouts)
        if outlook is PodOutlook.QUEUED or (needed > 0 and any(pod.outlook is PodOutlook.QUEUED for pod in missing)):
            self._queued_s = self._clock() - self._begun_s
            return math.inf
        if announced.trainers:
            silent = [pod for pod in missing if pod.outlook is not PodOutlook.COMING]
            may_come = rollout.replicas - len(silent) >= rollout.min_replicas
        else:
            may_come = outlook is PodOutlook.COMING
        return self._config.fleet.reschedule_timeout_s if may_come else 0.0


def _missing(announced: AnnouncedServices, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of replicas that are not announced."""
    names = {record.name for record in announced.rollouts}
    return [pod for pod in engines(pods) if pod.name not in names]
