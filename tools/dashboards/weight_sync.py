"""The dashboard "Weight sync": how long rounds take and why, who is slow, what came of them."""

from tools.dashboards.panels import COORDINATOR, ROLLOUT, TRAINER, Board, Panel, Row, Series, mean, percentile

_SECONDS = "tandem_weight_sync_seconds"
_TOTAL = f'{COORDINATOR}, stage="total"'
_STAGES = f'{COORDINATOR}, stage!="total"'

_LATENCY = Row(
    title="Latency",
    panels=(
        Panel(
            title="Whole round",
            help="From the first phase's start to the last one's end, failed rounds included. Generation waits.",
            unit="s",
            series=tuple(
                Series(expr=percentile(share, _SECONDS, _TOTAL), legend=f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            title="Stages, median",
            help="Of the participant that took longest over the stage.",
            unit="s",
            series=(Series(expr=percentile(0.5, _SECONDS, _STAGES, "stage"), legend="{{stage}}"),),
        ),
        Panel(
            title="Stages, 95th percentile",
            help="Of the participant that took longest over the stage.",
            unit="s",
            series=(Series(expr=percentile(0.95, _SECONDS, _STAGES, "stage"), legend="{{stage}}"),),
        ),
        Panel(
            title="Slowest replica",
            help="Seconds that each replica's slowest rank worked in its last sync. One far above: look at its node.",
            unit="s",
            series=(
                Series(expr=f"topk(5, tandem_replica_weight_sync_seconds{{{COORDINATOR}}})", legend="{{replica}}"),
            ),
        ),
        Panel(
            title="Wait for participants",
            help="Seconds until everyone who takes part had answered and held its slots.",
            unit="s",
            series=tuple(
                Series(
                    expr=percentile(share, "tandem_weight_sync_rendezvous_wait_seconds", COORDINATOR),
                    legend=f"p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ),
        ),
        Panel(
            title="Share of an iteration",
            help="Weight sync's part of the time of whole iterations.",
            unit="percentunit",
            series=(
                Series(
                    expr=f'sum (rate(tandem_iteration_seconds_sum{{{COORDINATOR}, part="sync"}}[$window])) / '
                    f'sum (rate(tandem_iteration_seconds_sum{{{COORDINATOR}, part="total"}}[$window]))',
                    legend="sync",
                ),
            ),
        ),
    ),
)
_BYTES = Row(
    title="Bytes",
    panels=(
        Panel(
            title="Goodput against the plan's prediction",
            help="Bytes of all rollout ranks / seconds of the whole round. The prediction takes sync.link_gbit for "
            "every link; over shared memory or on a CPU it is no yardstick.",
            unit="Bps",
            logarithmic=True,
            series=(
                Series(expr=f"tandem_weight_sync_goodput_bytes_per_second{{{COORDINATOR}}}", legend="measured"),
                Series(
                    expr=f"tandem_weight_sync_predicted_goodput_bytes_per_second{{{COORDINATOR}}}", legend="predicted"
                ),
            ),
        ),
        Panel(
            title="Round against the plan's prediction",
            help="Seconds of the last round, and what the plan predicts for the present fleet.",
            unit="s",
            logarithmic=True,
            series=(
                Series(expr=f"tandem_weight_sync_last_seconds{{{COORDINATOR}}}", legend="measured"),
                Series(expr=f"tandem_weight_sync_predicted_seconds{{{COORDINATOR}}}", legend="predicted"),
            ),
        ),
        Panel(
            title="Transfer bandwidth of each replica",
            help="Bytes that a replica's ranks received / seconds of its slowest rank's transfer.",
            unit="Bps",
            series=(Series(expr=f"tandem_weight_sync_bandwidth_bytes_per_second{{{ROLLOUT}}}", legend="{{replica}}"),),
        ),
        Panel(
            title="Bytes of a round",
            help="What all ranks, and the busiest one, received.",
            unit="bytes",
            series=(
                Series(
                    expr=f"sum (rate(tandem_weight_sync_bytes_total{{{COORDINATOR}}}[$window])) / "
                    f'sum (rate(tandem_weight_sync_rounds_total{{{COORDINATOR}, result="committed"}}[$window]))',
                    legend="all ranks",
                ),
                Series(expr=f"tandem_weight_sync_rank_bytes{{{COORDINATOR}}}", legend="busiest rank"),
            ),
        ),
        Panel(
            title="Redundancy",
            help="Bytes received / bytes of the ranks' own shards. 1: nothing travelled twice or for nothing.",
            unit="none",
            series=(Series(expr=f"tandem_weight_sync_redundancy_ratio{{{COORDINATOR}}}", legend="redundancy"),),
        ),
        Panel(
            title="Transfer buffers",
            help="Most bytes that a rank's buffers took in the last transfer; bounded by sync.bucket_mib.",
            unit="bytes",
            series=(Series(expr=f"tandem_weight_sync_staging_bytes{{{ROLLOUT}}}", legend="{{replica}}"),),
        ),
    ),
)
_OUTCOME = Row(
    title="Outcomes and versions",
    panels=(
        Panel(
            title="Outcomes",
            help="Replicas by how rounds ended for them. Poisoned ones must be seeded again before they serve.",
            unit="short",
            series=(
                Series(
                    expr=f"sum by (outcome) (increase(tandem_weight_sync_outcomes_total{{{COORDINATOR}}}[$window]))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Rounds",
            help="Rounds by result; a publication may take three.",
            unit="short",
            series=(
                Series(
                    expr=f"sum by (result) (increase(tandem_weight_sync_rounds_total{{{COORDINATOR}}}[$window]))",
                    legend="{{result}}",
                ),
                Series(
                    expr=f"sum (increase(tandem_weight_sync_verify_failures_total{{{COORDINATOR}}}[$window]))",
                    legend="digests differ",
                ),
            ),
        ),
        Panel(
            title="Epoch",
            help="Of the weight group. Each change of who is in it is a new epoch, and a new communicator.",
            unit="none",
            series=(
                Series(expr=f"tandem_weight_sync_epoch{{{COORDINATOR}}}", legend="coordinator"),
                Series(expr=f"tandem_weight_sync_epoch{{{ROLLOUT}}}", legend="{{replica}}"),
            ),
        ),
        Panel(
            title="Version skew",
            help="Versions between the newest and the oldest replica that the coordinator knows. 0 between rounds.",
            unit="none",
            series=(
                Series(
                    expr=f"max(tandem_replica_policy_version{{{COORDINATOR}}}) - "
                    f"min(tandem_replica_policy_version{{{COORDINATOR}}})",
                    legend="skew",
                ),
            ),
        ),
        Panel(
            title="Policy versions",
            help="Of the trainer, and what each replica serves.",
            unit="none",
            series=(
                Series(expr=f"tandem_policy_version{{{TRAINER}}}", legend="trainer"),
                Series(expr=f"tandem_policy_version{{{ROLLOUT}}}", legend="{{replica}}"),
            ),
        ),
        Panel(
            title="Trainer's phases, mean",
            help="Wall seconds of each phase on the trainer.",
            unit="s",
            series=(Series(expr=mean("tandem_trainer_publish_seconds", TRAINER, "phase"), legend="{{phase}}"),),
        ),
    ),
)

BOARD = Board(
    uid="tandem-weight-sync",
    title="Tandem: weight sync",
    help="From the trainer's shards to the rollouts' shards, after every update.",
    rows=(_LATENCY, _BYTES, _OUTCOME),
)
