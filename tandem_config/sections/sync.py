"""Settings of the weight sync."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tandem_config.sections.base import MessageMib, PositiveFloat, RoundSeconds, Section, about


class SyncSection(Section):
    """Weight sync."""

    install: Literal["in_place", "staged"] = Field(
        "in_place",
        description=(
            "in_place: no extra memory, generation pauses for the transfer; staged: one spare shard, pause is the "
            "flip only."
        ),
        json_schema_extra=about("no second copy of the weights; staged where pauses count more than memory"),
    )
    allow_staged_nccl: bool = Field(
        False,
        description=(
            "Allow staged weights over NCCL beside the collectives of engines with several ranks: NCCL does not "
            "guarantee that both make progress, and a hang blocks generation until transfer_timeout_s. false: such a "
            "round is refused in PREPARE."
        ),
        json_schema_extra=about("a refusal is cheaper than a hang"),
    )
    pause: Literal["drain", "keep_kv", "abort_requeue"] = Field(
        "drain",
        description="What happens to running requests.",
        json_schema_extra=about("no token is lost or made twice, and no completion mixes policies"),
    )
    transport: Literal["auto", "collective", "colocated", "disk"] = Field(
        "auto",
        description=(
            "auto: colocated where all ranks are on one host and run on CPUs, collective elsewhere; collective: NCCL "
            "or gloo messages; colocated: receivers read the trainer's memory; disk: files under disk_folder."
        ),
        json_schema_extra=about("the fastest that is tested on such a host"),
    )
    dtype: Literal["same", "bfloat16"] = Field(
        "same",
        description="Type of weights as sent and installed: the trainer's, or cast by the trainer (half the bytes).",
        json_schema_extra=about("rollouts get the trainer's weights, bit by bit"),
    )
    disk_folder: Path | None = Field(
        None,
        description="Folder of transport disk, the same path for every rank; null: weights/ in the run's folder.",
        json_schema_extra=about("beside the checkpoints; on several hosts it must be a shared folder"),
    )
    bucket_mib: MessageMib | None = Field(
        None,
        description=(
            "Largest message, in MiB (2^20 bytes); a rank has two in memory. null: 256 between GPUs, 32 "
            "between CPUs, divided by the replicas that the weights pass through (at least 4 and 1)."
        ),
        json_schema_extra=about("large enough for full bandwidth, small beside a shard", unit="MiB"),
    )
    link_gbit: PositiveFloat = Field(
        400.0,
        description=(
            "Bandwidth of a rank's link in each direction, for the predicted sync time on the dashboard; not used "
            "otherwise."
        ),
        json_schema_extra=about("a round number for one port per GPU", unit="Gbit/s"),
    )
    formation_timeout_s: RoundSeconds = Field(
        60.0,
        description="Seconds for the rendezvous of all ranks in a new epoch.",
        json_schema_extra=about("it takes seconds; missing ranks are reported after a minute", unit="s"),
    )
    transfer_timeout_s: RoundSeconds = Field(
        60.0,
        description="Seconds for one transfer.",
        json_schema_extra=about("16 GB take 0.3 s over 400 Gbit/s; slow networks have room", unit="s"),
    )
    probe_timeout_s: PositiveFloat = Field(
        10.0,
        description="Seconds for a service to answer a status call before it counts as lost.",
        json_schema_extra=about("a healthy service answers in milliseconds", unit="s"),
    )
    lease_ttl_s: PositiveFloat = Field(
        15.0,
        description="Seconds without a heartbeat after which a rank loses its slot.",
        json_schema_extra=about("three missed heartbeats of 5 s", unit="s"),
    )

    def published_folder(self, run_dir: Path) -> Path:
        """Return the folder of transport disk; the same for every process of a run."""
        return (self.disk_folder or run_dir / "weights").absolute()
