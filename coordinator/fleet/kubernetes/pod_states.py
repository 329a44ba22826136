"""Derives the states of replicas, of the trainer and of the queue from the run's pods.

pods of an engine                        the replica, which has the name of the leader
one                                      has the state of its pod
a leader and workers, all up             has the state of its leader
any of them leaves, or is dead           leaves: LeaderWorkerSet replaces all of them
any of them not ready, or in trouble     is not ready, in trouble
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from coordinator.fleet.kubernetes.api.pods import ROLLOUT, TRAINER, WORKER, Pod, PodOutlook

_FROM_BEST = (PodOutlook.UP, PodOutlook.COMING, PodOutlook.QUEUED, PodOutlook.DEAD)


def engines(pods: Sequence[Pod]) -> list[Pod]:
    """Return a pod per replica: its leader, in the state of the whole engine. Workers without a leader are ignored."""
    workers: Mapping[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        if pod.component == WORKER:
            workers[pod.leader].append(pod)
    return [_engine(pod, workers[pod.name]) for pod in pods if pod.component == ROLLOUT]


def _engine(leader: Pod, workers: Sequence[Pod]) -> Pod:
    if not workers:
        return leader
    troubles = [leader.trouble, *(f"{pod.name}: {pod.trouble}" for pod in workers if pod.trouble)]
    return dataclasses.replace(
        leader,
        leaving=leader.leaving or any(pod.leaving or pod.outlook is PodOutlook.DEAD for pod in workers),
        ready=all(pod.ready for pod in (leader, *workers)),
        restarts=sum(pod.restarts for pod in (leader, *workers)),
        outlook=max((pod.outlook for pod in (leader, *workers)), key=_FROM_BEST.index),
        trouble=next((text for text in troubles if text), ""),
    )


def trainers(pods: Sequence[Pod]) -> list[Pod]:
    """Return the trainer's pods, without those that have ended or leave where another one has their place."""
    mine = [pod for pod in pods if pod.component == TRAINER]
    filled = {pod.place for pod in mine if pod.place and not pod.goes}
    return [pod for pod in mine if not (pod.goes and pod.place in filled)]


def trainer_outlook(pods: Sequence[Pod]) -> tuple[PodOutlook, str]:
    """Judge the trainer by its pods.

    Returns: DEAD if a pod is dead (the others wait for it in vain); QUEUED if one is queued; UP if all are ready;
        else COMING, also without any pod, because the set is about to create them. And the pods' troubles:
        `trainer-0: container trainer: ...`.
    """
    mine = trainers(pods)
    dead = [pod for pod in mine if pod.outlook is PodOutlook.DEAD]
    reason = "; ".join(
        f"{pod.name}: {pod.trouble or 'not ready'}" for pod in dead or mine if pod.outlook is not PodOutlook.UP
    )
    if dead:
        return PodOutlook.DEAD, reason
    if any(pod.outlook is PodOutlook.QUEUED for pod in mine):
        return PodOutlook.QUEUED, reason
    if mine and all(pod.outlook is PodOutlook.UP for pod in mine):
        return PodOutlook.UP, ""
    return PodOutlook.COMING, reason or "no pod yet: the events of its set say why"


def queue_of(pods: Sequence[Pod]) -> str:
    """Say which pods are queued, in one sentence for all of them; "" if none is."""
    queued = [pod for pod in pods if pod.outlook is PodOutlook.QUEUED]
    if not queued:
        return ""
    components = " and ".join(sorted({pod.component for pod in queued}))
    return f"pods of {components} are {queued[0].trouble}: the run waits as long as they are queued"
