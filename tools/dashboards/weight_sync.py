"""The dashboard "Weight sync": latency, bytes and outcomes of rounds, and the slowest replicas."""

from tools.dashboards.panels import (
    COORDINATOR,
    ROLLOUT,
    TRAINER,
    Board,
    Row,
    Series,
    gauge,
    increase,
    mean,
    panel,
    percentile,
    percentiles,
)

_SECONDS = "tandem_weight_sync_seconds"
_TOTAL = f'{COORDINATOR}, stage="total"'
_STAGES = f'{COORDINATOR}, stage!="total"'

_LATENCY = Row(
    title="Latency",
    panels=(
        panel(
            "Whole round",
            "From the first phase's start to the last one's end, failed rounds included. Generation waits.",
            *percentiles(_SECONDS, 0.5, 0.95, 0.99, selector=_TOTAL),
            unit="s",
        ),
        panel(
            "Stages, median",
            "Of the participant that took longest for the stage.",
            percentile(0.5, _SECONDS, "{{stage}}", _STAGES, by="stage"),
            unit="s",
        ),
        panel(
            "Stages, 95th percentile",
            "Of the participant that took longest for the stage.",
            percentile(0.95, _SECONDS, "{{stage}}", _STAGES, by="stage"),
            unit="s",
        ),
        panel(
            "Slowest replica",
            "Seconds that each replica's slowest rank worked in its last sync. One far above: look at its node.",
            Series(expr=f"topk(5, tandem_replica_weight_sync_seconds{{{COORDINATOR}}})", legend="{{replica}}"),
            unit="s",
        ),
        panel(
            "Wait for participants",
            "Seconds until all participants were present.",
            *percentiles("tandem_weight_sync_rendezvous_wait_seconds", 0.5, 0.95),
            unit="s",
        ),
        panel(
            "Share of an iteration",
            "Weight sync's part of the time of whole iterations.",
            Series(
                expr=f'sum (rate(tandem_iteration_seconds_sum{{{COORDINATOR}, part="sync"}}[$window])) / '
                f'sum (rate(tandem_iteration_seconds_sum{{{COORDINATOR}, part="total"}}[$window]))',
                legend="sync",
            ),
            unit="percentunit",
        ),
    ),
)
_BYTES = Row(
    title="Bytes",
    panels=(
        panel(
            "Goodput against the plan's prediction",
            "Bytes of all rollout ranks / seconds of the whole round. The prediction takes sync.link_gbit for "
            "every link; over shared memory or on a CPU it does not apply.",
            gauge("tandem_weight_sync_goodput_bytes_per_second", "measured"),
            gauge("tandem_weight_sync_predicted_goodput_bytes_per_second", "predicted"),
            unit="Bps",
            logarithmic=True,
        ),
        panel(
            "Round against the plan's prediction",
            "Seconds of the last round, and what the plan predicts for the present fleet.",
            gauge("tandem_weight_sync_last_seconds", "measured"),
            gauge("tandem_weight_sync_predicted_seconds", "predicted"),
            unit="s",
            logarithmic=True,
        ),
        panel(
            "Transfer bandwidth of each replica",
            "Bytes that a replica's ranks received / seconds of its slowest rank's transfer.",
            gauge("tandem_weight_sync_bandwidth_bytes_per_second", "{{replica}}", ROLLOUT),
            unit="Bps",
        ),
        panel(
            "Bytes of a round",
            "Bytes that all ranks, and the busiest one, received.",
            Series(
                expr=f"sum (rate(tandem_weight_sync_bytes_total{{{COORDINATOR}}}[$window])) / "
                f'sum (rate(tandem_weight_sync_rounds_total{{{COORDINATOR}, result="committed"}}[$window]))',
                legend="all ranks",
            ),
            gauge("tandem_weight_sync_rank_bytes", "busiest rank"),
            unit="bytes",
        ),
        panel(
            "Redundancy",
            "Bytes received / bytes of the ranks' own shards. 1: nothing was sent twice or in vain.",
            gauge("tandem_weight_sync_redundancy_ratio", "redundancy"),
        ),
        panel(
            "Transfer buffers",
            "Most bytes that a rank's buffers took in the last transfer; bounded by sync.bucket_mib.",
            gauge("tandem_weight_sync_staging_bytes", "{{replica}}", ROLLOUT),
            gauge("tandem_weight_sync_staging_bytes", "trainer", TRAINER),
            unit="bytes",
        ),
    ),
)
_OUTCOME = Row(
    title="Outcomes and versions",
    panels=(
        panel(
            "Outcomes",
            "Replicas by their outcome of a round. Poisoned ones must be seeded again before they serve.",
            increase("tandem_weight_sync_outcomes_total", "{{outcome}}", by="outcome"),
            unit="short",
        ),
        panel(
            "Rounds",
            "Rounds by result; a publication may take three.",
            increase("tandem_weight_sync_rounds_total", "{{result}}", by="result"),
            increase("tandem_weight_sync_verify_failures_total", "digests differ"),
            unit="short",
        ),
        panel(
            "Epoch",
            "Of the weight group. Each change of its members is a new epoch, with a new communicator.",
            gauge("tandem_weight_sync_epoch", "coordinator"),
            gauge("tandem_weight_sync_epoch", "{{replica}}", ROLLOUT),
        ),
        panel(
            "Version skew",
            "Versions between the newest and the oldest replica that the coordinator knows. 0 between rounds.",
            Series(
                expr=f"max(tandem_replica_policy_version{{{COORDINATOR}}}) - "
                f"min(tandem_replica_policy_version{{{COORDINATOR}}})",
                legend="skew",
            ),
        ),
        panel(
            "Policy versions",
            "Of the trainer, and what each replica serves.",
            gauge("tandem_policy_version", "trainer", TRAINER),
            gauge("tandem_policy_version", "{{replica}}", ROLLOUT),
        ),
        panel(
            "Trainer's phases, mean",
            "Wall seconds of each phase on the trainer.",
            mean("tandem_trainer_publish_seconds", "{{phase}}", TRAINER, by="phase"),
            unit="s",
        ),
    ),
)

BOARD = Board(
    uid="tandem-weight-sync",
    title="Tandem: weight sync",
    help="From the trainer's shards to the rollouts' shards, after every update.",
    rows=(_LATENCY, _BYTES, _OUTCOME),
)
