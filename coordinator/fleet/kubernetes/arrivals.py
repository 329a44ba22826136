"""What pods say of services that are not announced: whether to wait for them, and how long.

trainer pods             a trainer that is not announced
starting, rescheduled    is waited for, up to fleet.reschedule_timeout_s: the cluster restarts it
dead                     ends the wait: a person must act
unknown                  is waited for, up to run.startup_timeout_s

All of rollout.replicas whose pods are starting are waited for, up to run.startup_timeout_s, since the first iteration
begins with those that are present. Replicas that are unschedulable or cannot start are not waited for, but at least
rollout.min_replicas are needed: while so many may still come, they are waited for as long as a trainer is. Later ones
are seeded when they come.
"""

from collections.abc import Sequence

from coordinator.fleet.arrivals import Announced, Outlook
from coordinator.fleet.kubernetes.api.pods import TRAINER, Pod, PodOutlook
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.engines import engines
from servicekit.errors import Unavailable
from tandem_config.schema import RunConfig


class TrainerDead(Unavailable):
    """The trainer's pods cannot start without a person's help."""


def trainer_outlook(pods: Sequence[Pod]) -> tuple[PodOutlook, str]:
    """Judge the trainer by its pods.

    Returns: DEAD if a pod is dead, since the others wait for it in vain; UP if all are ready; else COMING, also without
        any pod, since the set is about to create them. And the pods' troubles: `trainer-0: container trainer: ...`.
    """
    mine = [pod for pod in pods if pod.component == TRAINER]
    dead = [pod for pod in mine if pod.outlook is PodOutlook.DEAD]
    reason = "; ".join(
        f"{pod.name}: {pod.trouble or 'not ready'}" for pod in dead or mine if pod.outlook is not PodOutlook.UP
    )
    if dead:
        return PodOutlook.DEAD, reason
    if mine and all(pod.outlook is PodOutlook.UP for pod in mine):
        return PodOutlook.UP, ""
    return PodOutlook.COMING, reason or "no pod yet"


class ClusterOutlook(Outlook):
    """Of services in pods; each question updates the cluster's troubles."""

    def __init__(self, config: RunConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster

    def may_come(self, announced: Announced) -> bool:
        """Whether another replica is starting, or its pods are not known."""
        self._cluster.look()
        missing = _missing(announced, self._cluster.pods.pods)
        return not self._cluster.pods.is_current or any(
            pod.outlook is not PodOutlook.DEAD and not pod.trouble for pod in missing
        )

    def patience_s(self, announced: Announced) -> float:
        """Return run.startup_timeout_s, or longer for pods that may still come.

        Raises: TrainerDead: with the troubles of its pods.
        """
        self._cluster.look()
        longer_s = self._longest_s(announced) if self._cluster.pods.is_current else 0.0
        return max(self._config.run.startup_timeout_s, longer_s)

    def troubles(self, announced: Announced) -> list[str]:
        """Return those of the trainer's pods, if it is missing, and the cluster's."""
        pods = self._cluster.pods
        trainer = trainer_outlook(pods.pods)[1] if not announced.trainers and pods.is_current else ""
        return list(dict.fromkeys([*([trainer] if trainer else []), *self._cluster.troubles()]))

    def _longest_s(self, announced: Announced) -> float:
        pods, rollout = self._cluster.pods.pods, self._config.rollout
        if not announced.trainers:
            outlook, reason = trainer_outlook(pods)
            if outlook is PodOutlook.DEAD:
                raise TrainerDead(f"the trainer is dead, waiting would not help: {reason}")
            may_come = outlook is PodOutlook.COMING
        else:
            silent = [pod for pod in _missing(announced, pods) if pod.outlook is not PodOutlook.COMING]
            may_come = rollout.replicas - len(silent) >= rollout.min_replicas
        return self._config.fleet.reschedule_timeout_s if may_come else 0.0


def _missing(announced: Announced, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of replicas that are not announced."""
    names = {record.name for record in announced.rollouts}
    return [pod for pod in engines(pods) if pod.name not in names]
