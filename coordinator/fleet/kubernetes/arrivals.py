"""Waiting for the services of a run with an eye on their pods.

trainer pods             a trainer that is not announced
starting, rescheduled    is waited for, up to fleet.reschedule_timeout_s: the cluster brings it back
dead                     ends the wait at once: a person must act
not known                is waited for, up to run.startup_timeout_s

Replicas: all of rollout.replicas that are on their way are waited for, up to run.startup_timeout_s, since an iteration
begins with those that are there; those that no node takes, or that cannot start, are not. rollout.min_replicas there
must be. Who comes later is seeded then.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.fleet.kubernetes.api.pods import TRAINER, Fate, Pod
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.engines import engines
from coordinator.fleet.watched import ROLLOUT_ROLE, TRAINER_ROLE
from servicekit.errors import DeadlineExceeded, Unavailable
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig

# Between two looks at Redis; services take seconds to come.
LOOK_INTERVAL_S = 0.2


class TrainerDead(Unavailable):
    """The trainer does not come up by itself."""


def trainer_fate(pods: Sequence[Pod]) -> tuple[Fate, str]:
    """What becomes of the trainer by itself, and what its pods say: `trainer-0: container trainer: ...`.

    DEAD if a pod is: the others wait for it in vain. UP if all are ready, else COMING; so without any, since their set
    is about to make them.
    """
    mine = [pod for pod in pods if pod.component == TRAINER]
    dead = [pod for pod in mine if pod.fate is Fate.DEAD]
    told = "; ".join(f"{pod.name}: {pod.trouble or 'not ready'}" for pod in dead or mine if pod.fate is not Fate.UP)
    if dead:
        return Fate.DEAD, told
    if mine and all(pod.fate is Fate.UP for pod in mine):
        return Fate.UP, ""
    return Fate.COMING, told or "no pod yet"


@dataclass(frozen=True, kw_only=True)
class _Look:
    trainers: list[ServiceRecord]
    rollouts: list[ServiceRecord]


async def wait_for_services(config: RunConfig, registry: Registry, cluster: Cluster) -> ServiceRecord:
    """The trainer's record, once it and enough replicas are announced.

    Raises:
        TrainerDead: with what its pods say.
        DeadlineExceeded: who is missing, and what is wrong with the cluster.
    """
    start_s = time.monotonic()
    while True:
        look = await asyncio.to_thread(_read, registry)
        timeout_s = config.run.startup_timeout_s
        is_late = time.monotonic() - start_s >= timeout_s
        is_enough = len(look.rollouts) >= config.rollout.min_replicas
        if look.trainers and is_enough and (is_late or _are_all(config, look, cluster)):
            return look.trainers[0]
        cluster.look()
        if not look.trainers and cluster.pods.is_current:
            timeout_s = max(timeout_s, _patience_s(config, cluster.pods.pods))
        if time.monotonic() - start_s >= timeout_s:
            raise DeadlineExceeded(_complaint(config, look, cluster, timeout_s))
        await asyncio.sleep(LOOK_INTERVAL_S)


def _read(registry: Registry) -> _Look:
    return _Look(trainers=registry.list(TRAINER_ROLE), rollouts=registry.list(ROLLOUT_ROLE))


def _are_all(config: RunConfig, look: _Look, cluster: Cluster) -> bool:
    """Whether no other replica is about to come."""
    if len(look.rollouts) >= config.rollout.replicas:
        return True
    there = {record.name for record in look.rollouts}
    others = [pod for pod in engines(cluster.pods.pods) if pod.name not in there]
    return cluster.pods.is_current and not any(pod.fate is not Fate.DEAD and not pod.trouble for pod in others)


def _patience_s(config: RunConfig, pods: Sequence[Pod]) -> float:
    """How long the trainer's pods are worth waiting for. Raises: TrainerDead."""
    fate, told = trainer_fate(pods)
    if fate is Fate.DEAD:
        raise TrainerDead(f"the trainer is dead, waiting would not help: {told}")
    return config.fleet.reschedule_timeout_s if fate is Fate.COMING else 0.0


def _complaint(config: RunConfig, look: _Look, cluster: Cluster, timeout_s: float) -> str:
    there = ", ".join(record.name for record in [*look.trainers, *look.rollouts]) or "nobody"
    wanted = f"the trainer and {config.rollout.min_replicas} replicas (rollout.min_replicas)"
    pods = trainer_fate(cluster.pods.pods)[1] if not look.trainers and cluster.pods.is_current else ""
    told = list(dict.fromkeys([*([pods] if pods else []), *cluster.troubles()]))
    return "; ".join([f"waited {timeout_s:g} s for {wanted}; there: {there}", *told])
