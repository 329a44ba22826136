"""The dashboard "Weight sync": latency, bytes and outcomes of rounds, and the slowest replicas."""

from tools.dashboards.panels import (
    COORDINATOR,
    REPLICA,
    ROLLOUT,
    TRAINER,
    Board,
    Panel,
    Row,
    Series,
    gauge,
    heatmap,
    increase,
    mean,
    panel,
    percentile,
    percentiles,
)

_SECONDS = "tandem_weight_sync_seconds"
_PAUSE = "tandem_generation_pause_seconds"
_LAST = f"tandem_weight_sync_last_seconds{{{COORDINATOR}}}"
_TOTAL = f'{COORDINATOR}, stage="total"'
_STAGES = f'{COORDINATOR}, stage!="total"'

_MEAN_OF_STAGES = (
    f"sum by (stage) (rate({_SECONDS}_sum{{{_STAGES}}}[$window])) "
    f"/ on () group_left () sum (rate({_SECONDS}_count{{{_TOTAL}}}[$window]))"
)


def _durations(
    quantiles: tuple[str, str], buckets: tuple[str, str], metric: str, selector: str, *, alert: str
) -> tuple[Panel, Panel]:
    """Make the quantiles and the heatmap of a histogram of seconds. quantiles, buckets: title and help of each."""
    shares = percentiles(metric, 0.5, 0.95, 0.99, selector=selector)
    return panel(*quantiles, *shares, unit="s", alert=alert), heatmap(*buckets, metric, selector)


_LATENCY = Row(
    title="Latency",
    panels=(
        panel(
            "Last, mean, longest",
            "Seconds of a weight sync: of the last one, and of those within the window. With a sync per iteration of "
            "minutes, quantiles are of a handful of syncs: these three say more.",
            Series(expr=_LAST, legend="last"),
            mean(_SECONDS, "mean", _TOTAL),
            Series(expr=f"max_over_time({_LAST}[$window])", legend="longest"),
            unit="s",
            kind="stat",
        ),
        *_durations(
            ("Whole round", "From the first look for participants to the last phase's end, failed rounds included."),
            ("Rounds by duration", "How many syncs took how long."),
            _SECONDS,
            _TOTAL,
            alert="TandemWeightSyncSlow",
        ),
        panel(
            "Stages, mean",
            "Seconds of each stage per sync, of the participants that it waited for. They add up to the whole round; "
            "other is what is in none of them.",
            Series(expr=_MEAN_OF_STAGES, legend="{{stage}}"),
            unit="s",
            stacked=True,
            alert="TandemWeightSyncSlow",
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
            Series(
                expr=f"topk(5, tandem_replica_weight_sync_seconds{{{COORDINATOR}, {REPLICA}}})", legend="{{replica}}"
            ),
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
            alert="TandemWeightSyncShareHigh",
        ),
    ),
)
_PAUSES = Row(
    title="The pause that requests feel",
    panels=(
        *_durations(
            (
                "Pause that calls feel",
                "Seconds from closing a replica's gate to opening it again, measured there: calls are refused "
                "meanwhile.",
            ),
            ("Pauses by duration", "How many pauses of the chosen replicas took how long."),
            _PAUSE,
            ROLLOUT,
            alert="TandemGenerationPauseLong",
        ),
        panel(
            "Longest pauses",
            "Mean of each replica, of the five with the longest. One far above: look at its node.",
            Series(
                expr=f"topk(5, sum by (replica) (rate({_PAUSE}_sum{{{ROLLOUT}}}[$window])) / "
                f"sum by (replica) (rate({_PAUSE}_count{{{ROLLOUT}}}[$window])))",
                legend="{{replica}}",
            ),
            unit="s",
            alert="TandemGenerationPauseLong",
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
            alert="TandemReplicaPoisoned",
        ),
        panel(
            "Rounds",
            "Rounds by result; a publication may take three.",
            increase("tandem_weight_sync_rounds_total", "{{result}}", by="result"),
            increase("tandem_weight_sync_verify_failures_total", "digests differ"),
            unit="short",
            alert="TandemWeightSyncFailing",
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
            alert="TandemVersionsDiverge",
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
    rows=(_LATENCY, _PAUSES, _BYTES, _OUTCOME),
)
