"""Groups pods into engines, and derives the state of a replica from its pods.

pods of an engine                        the replica, which has the name of the leader
one                                      has the state of its pod
a leader and workers, all up             has the state of its leader
any of them leaves, or is dead           leaves: LeaderWorkerSet replaces all of them
any of them not ready, or in trouble     is not ready, in trouble
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from coordinator.fleet.kubernetes.api.pods import ROLLOUT, WORKER, Pod, PodOutlook

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
