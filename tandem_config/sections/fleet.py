"""Settings of the fleet: where replicas come from."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tandem_config.sections.base import PositiveFloat, Section, setting


class FleetSection(Section):
    """Where the rollout replicas run, and what the coordinator may do with their pods."""

    kind: Literal["registry", "kubernetes"] = setting("registry", "needs only Redis")
    """registry: replicas are found by their announcements in Redis; kubernetes: they are also pods, watched through the
    Kubernetes API: leaving pods are drained, stuck ones evicted."""
    kubeconfig: Path | None = setting(None, "in a pod the service account suffices")
    """How to reach the Kubernetes API; null: as the pod's service account, outside of a pod as kubectl."""
    rollout_set: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = setting(
        "rollout", "the name in deploy/base"
    )
    """The set whose pods are the replicas; a replica has its pod's name."""
    rollout_set_kind: Literal["StatefulSet", "LeaderWorkerSet"] = setting("StatefulSet", "needs no other controller")
    """Kind of that set: StatefulSet: a pod is an engine; LeaderWorkerSet: a group of pods is, and its leader is the
    replica; for rollout.nodes above 1."""
    trainer_set: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = setting(
        "trainer", "the name in deploy/base"
    )
    """The set whose pods are the trainer's hosts."""
    trainer_set_kind: Literal["StatefulSet", "JobSet"] = setting("StatefulSet", "needs no other controller")
    """Kind of that set: JobSet with the component jobset-trainer."""
    scale: bool = setting(False, "the size may be set on purpose, or by an autoscaler")
    """Bring the rollout set at the start to the size that the run had reached, at first to rollout.replicas, unless
    kubectl scale or an autoscaler has set it; false: its size is theirs, or the manifest's."""
    release_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = setting(
        0.0, "what a run leaves is on its volume; idle GPUs are of no use", "s"
    )
    """Seconds after the end of the run until its GPUs are given back: rollout set and trainer set are scaled to 0, a
    JobSet is deleted. The run has ended when it is finished or given up, not when it is interrupted. 0: immediately;
    null: never."""
    stuck_after_s: PositiveFloat = setting(1800.0, "a restart where it is comes first, another node after it", "s")
    """Seconds without an answer after which a replica is stuck and its pod is evicted. One whose engine stands still
    ends itself (rollout.stall_timeout_s), and the kubelet's probes restart one that is frozen."""
    max_evictions_per_hour: int = setting(
        4, "if all replicas are stuck, evicting pods does not help", "pods per hour", ge=0
    )
    """Stuck pods evicted within any hour; beyond it they are only reported. 0: evict none."""
    unready_after_s: PositiveFloat = setting(60.0, "longer than a sync and three probes", "s")
    """Seconds that a serving replica's pod may be not ready before it loses its work; longer than a weight sync and
    three readiness probes, during which it is not ready either."""
    reschedule_timeout_s: PositiveFloat = setting(1800.0, "a new node of a cluster autoscaler takes minutes", "s")
    """Seconds to wait, at the start, for a trainer, or min_replicas, whose pods are being rescheduled."""
