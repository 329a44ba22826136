"""Derives from a pod's status what it means for a run.

pod                                                      outlook
ready                                                    UP
held by a scheduling gate                                QUEUED   a queue admits it, hours later perhaps
deleted, evicted, node lost or shut down; new; starting  COMING   its set replaces or starts it: wait
ended, and its Job or set makes another one              COMING
an image cannot be pulled, a container not be made or    COMING   the kubelet tries again: a registry throttles, a
started                                                           driver is not loaded yet, a Secret comes late
only another pod can cure it: there is no such image;    DEAD     a person must act: waiting does not help
crashes again and again (crashes.py counts); ended, and
of no set

A pod that leaves for longer than it has been given is one whose node does not answer: a set of its kind makes no other
one of that name until the node returns, or a person acts.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from servicekit.errors import ConfigError

NAME_LABEL, NAME = "app.kubernetes.io/name", "tandem"
COMPONENT_LABEL = "app.kubernetes.io/component"
RUN_LABEL = "tandem.run/id"
ROLLOUT, WORKER, TRAINER = "rollout", "rollout-worker", "trainer"
# LeaderWorkerSet's annotation of a worker pod with its leader.
LEADER_ANNOTATION = "leaderworkerset.sigs.k8s.io/leader-name"

# Waiting reasons of a container that is on its way; all others are troubles.
_ON_ITS_WAY = frozenset({None, "", "ContainerCreating", "PodInitializing"})
# Waiting reasons that name a field of the pod, which is never changed: a person must correct the manifest.
_OF_ITS_SPEC = frozenset({"ErrImageNeverPull", "InvalidImageName"})
# What containerd, CRI-O and Docker say when the registry has answered that there is no such image, or none for this
# machine. Neither a layer that is `not found` (a cache), nor a refusal (`unauthorized`, `denied`): a token service that
# throttles is one too, credentials are corrected in place, and registries refuse what they do not have.
_NO_SUCH_IMAGE = re.compile(
    r'failed to resolve (?:reference "[^"]+"|image): \S+: not found|manifest unknown|name unknown'
    r"|no match for platform in manifest|no image found in (?:image index|manifest list)|no matching manifest for"
)
# CRI-O has asked several registries: that of them which has the image may be the one that did not answer.
_OTHERS_FAILED = "Mirrors also failed"
_CRASH_LOOP = "CrashLoopBackOff"
# How a container ends that its runtime could not start, by containerd and Docker. That is no crash.
_NEVER_BEGAN = frozenset({"ContainerCannotRun", "StartError"})
_ENDED = frozenset({"Failed", "Succeeded"})
# Seconds after the end of its grace period for a pod to be gone: a killed process gives hundreds of GB of pinned memory
# back first, then volumes are unmounted, and clocks differ.
GONE_AFTER_S = 60.0
# Annotation of a pod of an indexed Job with its index.
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"


class PodOutlook(Enum):
    """What happens to a pod without a person's help."""

    UP = "up"
    COMING = "coming"
    QUEUED = "queued"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod of the run.

    Attributes:
        component: "rollout" or "trainer"; "rollout-worker" for the further pods of an engine that has several.
        leader: leader pod of such a worker, which is the replica; "" for all others.
        leaving: its deletion has been requested.
        leaves_by_s: end of the grace period of its deletion, in Unix time; inf: it does not leave.
        node: its node; "": it has none yet.
        restarts: of all its containers.
        trouble: why it is not up; "" if there is no trouble.
        place: what a successor of this pod fills instead of it: a name in its owner; "" without an owner.
        ended: its containers have ended, and are not started again in this pod.
        crashes: restarts of the container that crashes again and again; 0: none does.
        ran_s: how long that container ran before its last crash; None: not known; inf: it never began, which is none.
        node: where it is, or will be started; "": none has been found yet.
    """

    name: str
    uid: str
    component: str
    leaving: bool
    ready: bool
    restarts: int
    outlook: PodOutlook
    trouble: str
    leader: str = ""
    place: str = ""
    ended: bool = False
    crashes: int = 0
    ran_s: float | None = None
    leaves_by_s: float = math.inf
    node: str = ""

    @property
    def incarnation(self) -> tuple[str, int]:
        """An identity that changes when the processes of the pod are restarted."""
        return self.uid, self.restarts

    @property
    def goes(self) -> bool:
        """Whether it will not work again: it has ended, or is being deleted."""
        return self.ended or self.leaving


def selector(run_id: str) -> str:
    """Make the label selector of a run's pods.

    Raises: ConfigError: the run id cannot be the value of a label.
    """
    if len(run_id) > 63 or not run_id[-1].isalnum():
        raise ConfigError(
            f"environment variable TANDEM_RUN_ID={run_id!r} cannot be the value of a Kubernetes label ({RUN_LABEL}): "
            "at most 63 characters, ending in a letter or digit"
        )
    return f"{NAME_LABEL}={NAME},{COMPONENT_LABEL} in ({ROLLOUT},{WORKER},{TRAINER}),{RUN_LABEL}={run_id}"


def seen_at(pod: Pod, now_s: float) -> Pod:
    """Return a pod with the trouble that it is in at a time, in Unix time, if it should be gone and is not."""
    if now_s < pod.leaves_by_s + GONE_AFTER_S:
        return pod
    # Without the seconds since then: a trouble is reported once per text.
    since = datetime.fromtimestamp(pod.leaves_by_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    trouble = f"should have left by {since} and is still there: its node {pod.node} does not answer, or cannot end it"
    return dataclasses.replace(pod, trouble=f"{trouble} (docs/kubernetes.md, A lost node)")


def read_pod(pod: Any) -> Pod:
    """Read a pod from the client's V1Pod."""
    containers = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    leaving = pod.metadata.deletion_timestamp is not None
    ready = _condition(pod, "Ready", "True") is not None and not leaving
    outlook, trouble = (PodOutlook.UP, "") if ready else _outlook(pod, containers, leaving)
    annotations = pod.metadata.annotations or {}
    owner = _owner(pod)
    crashing = None if ready or leaving else _crashing(containers)
    return Pod(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        component=(pod.metadata.labels or {}).get(COMPONENT_LABEL, ""),
        leaving=leaving,
        ready=ready,
        restarts=sum(container.restart_count for container in containers),
        outlook=outlook,
        trouble=" ".join(trouble.split()),
        leader=annotations.get(LEADER_ANNOTATION, ""),
        place="" if owner is None else f"{owner.name}/{annotations.get(INDEX_ANNOTATION, pod.metadata.name)}",
        ended=pod.status.phase in _ENDED,
        crashes=0 if crashing is None else crashing.restart_count,
        ran_s=None if crashing is None else _ran_s(crashing),
        leaves_by_s=pod.metadata.deletion_timestamp.timestamp() if leaving else math.inf,
        node=(pod.spec.node_name or "") if pod.spec is not None else "",
    )


def _outlook(pod: Any, containers: list[Any], leaving: bool) -> tuple[PodOutlook, str]:
    """Return the outlook of a pod that is not ready, and its trouble."""
    if leaving:
        return PodOutlook.COMING, ""
    if pod.status.phase in _ENDED:
        return _outlook_of_ended(pod, containers)
    unschedulable = _condition(pod, "PodScheduled", "False")
    gates = [gate.name for gate in (pod.spec.scheduling_gates or [])] if pod.spec is not None else []
    if gates or (unschedulable is not None and unschedulable.reason == "SchedulingGated"):
        return PodOutlook.QUEUED, f"queued: held by the scheduling gate {', '.join(gates) or '(unnamed)'}"
    if unschedulable is not None:
        return PodOutlook.COMING, f"unschedulable: {unschedulable.message or unschedulable.reason}"
    troubles = [found for found in map(_outlook_of_waiting, containers) if found[1]]
    dead = [found for found in troubles if found[0] is PodOutlook.DEAD]
    return (dead or troubles or [(PodOutlook.COMING, "")])[0]


def _outlook_of_ended(pod: Any, containers: list[Any]) -> tuple[PodOutlook, str]:
    owner = _owner(pod)
    detail = ": ".join(text for text in (pod.status.reason, pod.status.message or _last_end(containers)) if text)
    ended = f"ended ({detail or pod.status.phase.lower()})"
    if owner is None:
        return PodOutlook.DEAD, ended
    # A Job, and the JobSet above it, have a budget that is not known here: the wait for another pod has an end.
    return PodOutlook.COMING, f"{ended}, {owner.kind} {owner.name} may replace it"


def _outlook_of_waiting(container: Any) -> tuple[PodOutlook, str]:
    """Return what a container means for its pod, and its trouble; "" if it runs, or is on its way."""
    waiting = container.state.waiting if container.state is not None else None
    if waiting is None or waiting.reason in _ON_ITS_WAY:
        return PodOutlook.COMING, ""
    trouble, message = f"container {container.name}: {waiting.reason}", waiting.message or ""
    if waiting.reason == _CRASH_LOOP:
        why = _last_end([container])
        return PodOutlook.COMING, f"{trouble}{f': {why}' if why else ''}, {container.restart_count} restarts"
    is_missing = _NO_SUCH_IMAGE.search(message) is not None and _OTHERS_FAILED not in message
    is_dead = waiting.reason in _OF_ITS_SPEC or is_missing
    return PodOutlook.DEAD if is_dead else PodOutlook.COMING, f"{trouble}{f': {message}' if message else ''}"


def _crashing(containers: list[Any]) -> Any:
    """Return the container that waits to be started once more after a crash, or None."""
    for container in containers:
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason == _CRASH_LOOP:
            return container
    return None


def _ran_s(container: Any) -> float | None:
    """Return how long a container ran that has ended; None: the status does not say; inf: it never began."""
    ended = container.last_state.terminated if container.last_state is not None else None
    if ended is not None and ended.reason in _NEVER_BEGAN:
        return math.inf
    if ended is None or ended.started_at is None or ended.finished_at is None:
        return None
    return float((ended.finished_at - ended.started_at).total_seconds())


def _owner(pod: Any) -> Any:
    """Return the reference to the controller that made the pod, or None."""
    return next((owner for owner in (pod.metadata.owner_references or []) if owner.controller), None)


def _last_end(containers: list[Any]) -> str:
    """Describe how a container ended last, e.g. `OOMKilled (exit code 137)`; one that never began, with the reason."""
    for container in containers:
        for state in (container.state, container.last_state):
            ended = state.terminated if state is not None else None
            if ended is not None:
                why = f": {ended.message}" if ended.reason in _NEVER_BEGAN and ended.message else ""
                return f"{ended.reason or 'ended'} (exit code {ended.exit_code}){why}"
    return ""


def _condition(pod: Any, kind: str, status: str) -> Any:
    conditions = pod.status.conditions or []
    return next((condition for condition in conditions if (condition.type, condition.status) == (kind, status)), None)
