"""Judges the trainer, and the queue, by the run's pods."""

from collections.abc import Sequence

from coordinator.fleet.kubernetes.api.pods import TRAINER, Pod, PodOutlook


def trainers(pods: Sequence[Pod]) -> list[Pod]:
    """Return the trainer's pods, without those that have ended or leave where another one has their place."""
    mine = [pod for pod in pods if pod.component == TRAINER]
    filled = {pod.place for pod in mine if pod.place and not pod.goes}
    return [pod for pod in mine if not (pod.goes and pod.place in filled)]


def trainer_outlook(pods: Sequence[Pod]) -> tuple[PodOutlook, str]:
    """Judge the trainer by its pods.

    Returns: DEAD if a pod is dead, since the others wait for it in vain; QUEUED if one is queued; UP if all are ready;
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
    return PodOutlook.COMING, reason or "no pod yet"


def queue_of(pods: Sequence[Pod]) -> str:
    """Say which pods are queued, in one sentence for all of them; "" if none is."""
    queued = [pod for pod in pods if pod.outlook is PodOutlook.QUEUED]
    if not queued:
        return ""
    components = " and ".join(sorted({pod.component for pod in queued}))
    return f"pods of {components} are {queued[0].trouble}: the run waits as long as they are queued"
