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
            "Move staged weights over NCCL beside the collectives of engines with several ranks, too: NCCL does not "
            "promise that both go on, and what hangs holds generation up until transfer_timeout_s. false: such a round "
            "is refused in its prepare."
        ),
        json_schema_extra=about("a refusal costs one setting, a hang all of the generation"),
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
        json_schema_extra=about("the fastest that has been proven on the host at hand"),
    )
    dtype: Literal["same", "bfloat16"] = Field(
        "same",
        description="Type that weights travel and arrive in: the trainer's, or cast by the trainer (half the bytes).",
        json_schema_extra=about("what the trainer has is what the rollouts get, bit by bit"),
    )
    disk_folder: Path | None = Field(
        None,
        description="Where transport disk writes, the same path for every rank; null: weights/ in the run's folder.",
        json_schema_extra=about("beside the checkpoints; on several hosts it must be a shared folder"),
    )
    bucket_mib: MessageMib | None = Field(
        None,
        description=(
            "Largest message, in MiB (2^20 bytes); two per rank are in memory at once. null: 256 between GPUs, 32 "
            "between CPUs, divided by the replicas that the weights pass through (at least 4 and 1)."
        ),
        json_schema_extra=about("large enough for full bandwidth, small beside a shard", unit="MiB"),
    )
    link_gbit: PositiveFloat = Field(
        400.0,
        description=(
            "Gbit/s of each rank's link, each way: what the sync predicted on the dashboard is worth (nothing else "
            "uses it). 400 is a round number for one port per GPU."
        ),
        json_schema_extra=about("a round number for one port per GPU", unit="Gbit/s"),
    )
    formation_timeout_s: RoundSeconds = Field(
        60.0,
        description="Seconds for all ranks to meet in a new epoch.",
        json_schema_extra=about("ranks meet within seconds; one that is missing is named after a minute", unit="s"),
    )
    transfer_timeout_s: RoundSeconds = Field(
        60.0,
        description="Seconds for one transfer.",
        json_schema_extra=about("16 GB take 0.3 s over 400 Gbit/s; slow networks have room", unit="s"),
    )
    probe_timeout_s: PositiveFloat = Field(
        10.0,
        description="Seconds for a service to say how it is before it is taken for lost.",
        json_schema_extra=about("a status is answered in milliseconds, unless something is wrong", unit="s"),
    )
    lease_ttl_s: PositiveFloat = Field(
        15.0,
        description="Seconds without a heartbeat after which a rank loses its slot.",
        json_schema_extra=about("three missed heartbeats of 5 s", unit="s"),
    )

    def published_folder(self, run_dir: Path) -> Path:
        """Where transport disk writes; the same for every process of a run."""
        return (self.disk_folder or run_dir / "weights").absolute()
