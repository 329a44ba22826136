"""Settings of the weight sync."""

from pathlib import Path
from typing import Literal

from tandem_config.sections.base import MessageMib, PositiveFloat, RoundSeconds, Section, setting


class SyncSection(Section):
    """Weight sync."""

    install: Literal["in_place", "staged"] = setting(
        "in_place", "no second copy of the weights; staged where pauses count more than memory"
    )
    """in_place: no extra memory, generation pauses for the transfer; staged: one spare shard, pause is the flip
    only."""
    allow_staged_nccl: bool = setting(False, "a refusal is cheaper than a hang")
    """Allow staged weights over NCCL during the collectives of engines with several ranks: NCCL does not guarantee that
    both make progress, and a hang blocks generation until transfer_timeout_s. false: such a round is refused in
    PREPARE."""
    pause: Literal["drain", "keep_kv", "recompute", "abort_requeue"] = setting(
        "drain", "no token is lost or made twice, and no completion mixes policies"
    )
    """What happens to running requests. drain: they end first; keep_kv: new weights continue on their KV cache;
    recompute: after a new prefill of prompt and tokens so far, which is exact; abort_requeue: the same by way of the
    coordinator, on any replica."""
    transport: Literal["auto", "collective", "colocated", "disk"] = setting(
        "auto", "the fastest that is tested on such a host"
    )
    """auto: colocated where all ranks are on one host and run on CPUs, collective elsewhere; collective: NCCL or gloo
    messages; colocated: receivers read the trainer's memory; disk: files under disk_folder."""
    dtype: Literal["same", "bfloat16"] = setting("same", "rollouts get the trainer's weights, bit by bit")
    """Type of weights as sent and installed: the trainer's, or cast by the trainer (half the bytes)."""
    disk_folder: Path | None = setting(None, "beside the checkpoints; on several hosts it must be a shared folder")
    """Folder of transport disk, the same path for every rank; null: weights/ in the run's folder."""
    bucket_mib: MessageMib | None = setting(None, "large enough for full bandwidth, small compared with a shard", "MiB")
    """Largest message, in MiB (2^20 bytes); a rank has two in memory. null: 256 between GPUs, 32 between CPUs, divided
    by the replicas that the weights pass through (at least 4 and 1)."""
    link_gbit: PositiveFloat = setting(400.0, "a round number for one port per GPU", "Gbit/s")
    """Bandwidth of a rank's link in each direction, for the sync time that the dashboard and `tandem check`
    predict; not used otherwise."""
    formation_timeout_s: RoundSeconds = setting(
        60.0, "it takes seconds; missing ranks are reported after a minute", "s"
    )
    """Seconds for the rendezvous of all ranks in a new epoch."""
    transfer_timeout_s: RoundSeconds = setting(60.0, "16 GB take 0.3 s over 400 Gbit/s; slow networks have room", "s")
    """Seconds for one transfer."""
    probe_timeout_s: PositiveFloat = setting(10.0, "a healthy service answers in milliseconds", "s")
    """Seconds for a service to answer a status call before it counts as lost."""
    straggler_timeout_s: PositiveFloat | None = setting(None, "replicas have nothing else to do meanwhile", "s")
    """Seconds that a phase waits for a replica longer than twice what half of the others have taken. Then it is left
    out, and seeded by a round of its own, which may take as long as the last one and these seconds. null: as long as
    the phase may take; 30 with schedule.kind: async."""
    lease_ttl_s: PositiveFloat = setting(15.0, "three missed heartbeats of 5 s", "s")
    """Seconds without a heartbeat after which a rank loses its slot."""

    def published_folder(self, run_dir: Path) -> Path:
        """Return the folder of transport disk; the same for every process of a run."""
        return (self.disk_folder or run_dir / "weights").absolute()
