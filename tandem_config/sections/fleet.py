"""Settings of the fleet: where replicas come from."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tandem_config.sections.base import PositiveFloat, Section, about


class FleetSection(Section):
    """Where the rollout replicas run, and what the coordinator may do with their pods."""

    kind: Literal["registry", "kubernetes"] = Field(
        "registry",
        description=(
            "registry: replicas are found by their announcements in Redis; kubernetes: they are also pods, watched "
            "through the Kubernetes API: leaving pods are drained, stuck ones evicted."
        ),
        json_schema_extra=about("needs only Redis"),
    )
    kubeconfig: Path | None = Field(
        None,
        description="How to reach the Kubernetes API; null: as the pod's service account, outside of a pod as kubectl.",
        json_schema_extra=about("in a pod the service account suffices"),
    )
    rollout_set: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = Field(
        "rollout",
        description="The set whose pods are the replicas; a replica has its pod's name.",
        json_schema_extra=about("the name in deploy/base"),
    )
    rollout_set_kind: Literal["StatefulSet", "LeaderWorkerSet"] = Field(
        "StatefulSet",
        description=(
            "Kind of that set: StatefulSet: a pod is an engine; LeaderWorkerSet: a group of pods is, and its leader is "
            "the replica; for rollout.nodes above 1."
        ),
        json_schema_extra=about("needs no other controller"),
    )
    trainer_set: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = Field(
        "trainer",
        description="The set whose pods are the trainer's hosts.",
        json_schema_extra=about("the name in deploy/base"),
    )
    trainer_set_kind: Literal["StatefulSet", "JobSet"] = Field(
        "StatefulSet",
        description="Kind of that set: JobSet with the component jobset-trainer.",
        json_schema_extra=about("needs no other controller"),
    )
    scale: bool = Field(
        False,
        description=(
            "Bring the rollout set to rollout.replicas at the start; false: its size is kubectl's or an autoscaler's."
        ),
        json_schema_extra=about("the size may be set on purpose, or by an autoscaler"),
    )
    release_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        0.0,
        description=(
            "Seconds after the end of the run until its GPUs are given back: rollout set and trainer set are scaled to "
            "0, a JobSet is deleted. The run has ended when it is finished or given up, not when it is interrupted. 0: "
            "immediately; null: never."
        ),
        json_schema_extra=about("what a run leaves is on its volume; idle GPUs are of no use", unit="s"),
    )
    stuck_after_s: PositiveFloat = Field(
        1800.0,
        description=(
            "Seconds without an answer after which a replica is stuck and its pod is evicted. One whose engine stands "
            "still ends itself (rollout.stall_timeout_s), and the kubelet's probes restart one that is frozen."
        ),
        json_schema_extra=about("a restart where it is comes first, another node after it", unit="s"),
    )
    max_evictions_per_hour: Annotated[int, Field(ge=0)] = Field(
        4,
        description="Stuck pods evicted within any hour; beyond it they are only reported. 0: evict none.",
        json_schema_extra=about("if all replicas are stuck, evicting pods does not help", unit="pods per hour"),
    )
    unready_after_s: PositiveFloat = Field(
        60.0,
        description=(
            "Seconds that a serving replica's pod may be not ready before it loses its work; longer than a weight sync "
            "and three readiness probes, during which it is not ready either."
        ),
        json_schema_extra=about("longer than a sync and three probes", unit="s"),
    )
    reschedule_timeout_s: PositiveFloat = Field(
        1800.0,
        description="Seconds to wait, at the start, for a trainer, or min_replicas, whose pods are being rescheduled.",
        json_schema_extra=about("a new node of a cluster autoscaler takes minutes", unit="s"),
    )
    request_timeout_s: PositiveFloat = Field(
        10.0,
        description="Seconds for one request to the Kubernetes API.",
        json_schema_extra=about("an API server that is up answers within one", unit="s"),
    )
