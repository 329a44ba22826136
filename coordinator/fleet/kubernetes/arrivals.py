"""Waits for the services of a run, and watches their pods.

trainer pods             a trainer that is not announced
starting, rescheduled    is waited for, up to fleet.reschedule_timeout_s: the cluster restarts it
dead                     ends the wait: a person must act
unknown                  is waited for, up to run.startup_timeout_s

All of rollout.replicas whose pods are starting are waited for, up to run.startup_timeout_s, since the first iteration
begins with those that are present. Replicas that are unschedulable or cannot start are not waited for, but at least
rollout.min_replicas are needed: while so many may still come, they are waited for as long as a trainer is. Later ones
are seeded when they come.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.fleet.kubernetes.api.pods import TRAINER, Pod, PodOutlook
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.engines import engines
from coordinator.fleet.watched import ROLLOUT_ROLE, TRAINER_ROLE
from servicekit.errors import DeadlineExceeded, Unavailable
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig

# Between two polls of Redis; services take seconds to start.
LOOK_INTERVAL_S = 0.2


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


@dataclass(frozen=True, kw_only=True)
class _Announced:
    trainers: list[ServiceRecord]
    rollouts: list[ServiceRecord]


async def wait_for_services(config: RunConfig, registry: Registry, cluster: Cluster) -> ServiceRecord:
    """Wait until the trainer and enough replicas are announced.

    Returns: the trainer's record.
    Raises:
        TrainerDead: with the troubles of its pods.
        DeadlineExceeded: with the services that are announced, and the cluster's troubles.
    """
    start_s = time.monotonic()
    while True:
        announced = await asyncio.to_thread(_read, registry)
        timeout_s = config.run.startup_timeout_s
        is_late = time.monotonic() - start_s >= timeout_s
        is_enough = len(announced.rollouts) >= config.rollout.min_replicas
        if announced.trainers and is_enough and (is_late or _are_all(config, announced, cluster)):
            return announced.trainers[0]
        cluster.look()
        if not (announced.trainers and is_enough) and cluster.pods.is_current:
            timeout_s = max(timeout_s, _patience_s(config, announced, cluster.pods.pods))
        if time.monotonic() - start_s >= timeout_s:
            raise DeadlineExceeded(_timeout_message(config, announced, cluster, timeout_s))
        await asyncio.sleep(LOOK_INTERVAL_S)


def _read(registry: Registry) -> _Announced:
    return _Announced(trainers=registry.list(TRAINER_ROLE), rollouts=registry.list(ROLLOUT_ROLE))


def _are_all(config: RunConfig, announced: _Announced, cluster: Cluster) -> bool:
    """Whether no other replica is starting."""
    if len(announced.rollouts) >= config.rollout.replicas:
        return True
    missing = _missing(announced, cluster.pods.pods)
    return cluster.pods.is_current and not any(
        pod.outlook is not PodOutlook.DEAD and not pod.trouble for pod in missing
    )


def _patience_s(config: RunConfig, announced: _Announced, pods: Sequence[Pod]) -> float:
    """Return how long to wait for pods that are needed and may still come, in seconds. Raises: TrainerDead."""
    if not announced.trainers:
        outlook, reason = trainer_outlook(pods)
        if outlook is PodOutlook.DEAD:
            raise TrainerDead(f"the trainer is dead, waiting would not help: {reason}")
        may_come = outlook is PodOutlook.COMING
    else:
        silent = [pod for pod in _missing(announced, pods) if pod.outlook is not PodOutlook.COMING]
        may_come = config.rollout.replicas - len(silent) >= config.rollout.min_replicas
    return config.fleet.reschedule_timeout_s if may_come else 0.0


def _missing(announced: _Announced, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of replicas that are not announced."""
    names = {record.name for record in announced.rollouts}
    return [pod for pod in engines(pods) if pod.name not in names]


def _timeout_message(config: RunConfig, announced: _Announced, cluster: Cluster, timeout_s: float) -> str:
    names = ", ".join(record.name for record in [*announced.trainers, *announced.rollouts]) or "none"
    wanted = f"the trainer and {config.rollout.min_replicas} replicas (rollout.min_replicas)"
    pods = trainer_outlook(cluster.pods.pods)[1] if not announced.trainers and cluster.pods.is_current else ""
    troubles = list(dict.fromkeys([*([pods] if pods else []), *cluster.troubles()]))
    return "; ".join([f"waited {timeout_s:g} s for {wanted}; announced: {names}", *troubles])
