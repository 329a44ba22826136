"""The dashboard "Fleet": the replicas, how busy they are, and what is wrong with the processes."""

from tools.dashboards.panels import COORDINATOR, ROLLOUT, RUN, Board, Panel, Row, Series, percentile

_REPLICAS = Row(
    title="Replicas",
    panels=(
        Panel(
            title="Replicas by state",
            help="As they say themselves. Paused during a sync; unseeded and poisoned ones wait for one.",
            unit="none",
            stacked=True,
            series=(Series(expr=f"sum by (state) (tandem_replica_state{{{ROLLOUT}}})", legend="{{state}}"),),
        ),
        Panel(
            title="Announced and serving",
            help="As the coordinator sees them. Apart for long: see TandemReplicaNotServing.",
            unit="none",
            series=(
                Series(expr=f"tandem_announced_replicas{{{COORDINATOR}}}", legend="announced"),
                Series(expr=f"tandem_serving_replicas{{{COORDINATOR}}}", legend="serving"),
            ),
        ),
        Panel(
            title="Restarts",
            help="Times that a replica has come back as a new process, and stuck pods that were evicted, while this "
            "coordinator has been there.",
            unit="none",
            series=(
                Series(expr=f"tandem_replica_starts_total{{{COORDINATOR}}} - 1", legend="{{replica}}"),
                Series(expr=f"tandem_replica_evictions_total{{{COORDINATOR}}}", legend="evicted pods"),
            ),
        ),
        Panel(
            title="Tokens per second",
            help="Sampled by each replica.",
            unit="none",
            stacked=True,
            series=(
                Series(
                    expr=f"sum by (replica) (rate(tandem_generated_tokens_total{{{ROLLOUT}}}[$window]))",
                    legend="{{replica}}",
                ),
            ),
        ),
        Panel(
            title="Queue",
            help="Completions in an engine, and those of them that wait for room.",
            unit="none",
            series=(
                Series(expr=f"tandem_engine_requests{{{ROLLOUT}}}", legend="{{replica}} all"),
                Series(expr=f"tandem_engine_waiting_requests{{{ROLLOUT}}}", legend="{{replica}} waiting"),
            ),
        ),
        Panel(
            title="KV cache",
            help="Share in use. Near 1 with a queue: the engine is limited by memory.",
            unit="percentunit",
            series=(Series(expr=f"tandem_kv_cache_usage_ratio{{{ROLLOUT}}}", legend="{{replica}}"),),
        ),
        Panel(
            title="Groups being generated",
            help="Prompts in flight.",
            unit="none",
            stacked=True,
            series=(Series(expr=f"tandem_running_groups{{{ROLLOUT}}}", legend="{{replica}}"),),
        ),
        Panel(
            title="Generate calls",
            help="Seconds of a call: as long as its longest completion.",
            unit="s",
            series=tuple(
                Series(
                    expr=percentile(share, "tandem_generate_seconds", ROLLOUT, "replica"),
                    legend=f"{{{{replica}}}} p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ),
        ),
        Panel(
            title="Calls that failed",
            help="Generate calls whose groups were generated elsewhere or again.",
            unit="short",
            series=(
                Series(
                    expr=f"sum (increase(tandem_generate_retries_total{{{COORDINATOR}}}[$window]))", legend="retried"
                ),
            ),
        ),
    ),
)
_PROCESSES = Row(
    title="Processes",
    panels=(
        Panel(
            title="Scraped",
            help="1 while Prometheus can read a service's metrics.",
            unit="none",
            series=(Series(expr=f'up{{job=~"coordinator|trainer|rollout", {RUN}}}', legend="{{job}} {{instance}}"),),
        ),
        Panel(
            title="RPCs",
            help="Per second, by service and status code.",
            unit="reqps",
            series=(
                Series(
                    expr=f"sum by (job, code) (rate(tandem_rpc_total{{{RUN}}}[$window]))", legend="{{job}} {{code}}"
                ),
            ),
        ),
        Panel(
            title="Lease renewals that failed",
            help="By reason: Redis did not answer, the lease had expired, another worker has it.",
            unit="short",
            series=(
                Series(
                    expr=f"sum by (job, reason) (increase(tandem_lease_renewals_failed_total{{{RUN}}}[$window]))",
                    legend="{{job}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Disk of the run's folder",
            help="Share that is free.",
            unit="percentunit",
            series=(
                Series(
                    expr=f"tandem_run_dir_free_bytes{{{RUN}}} / tandem_run_dir_size_bytes{{{RUN}}}", legend="{{job}}"
                ),
            ),
        ),
        Panel(
            title="Memory",
            help="Resident bytes of each service's own process (an engine's ranks are further processes).",
            unit="bytes",
            series=(
                Series(
                    expr=f'process_resident_memory_bytes{{job=~"coordinator|trainer|rollout", {RUN}}}',
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Processor",
            help="Cores that each service's own process uses.",
            unit="none",
            series=(
                Series(
                    expr=f'rate(process_cpu_seconds_total{{job=~"coordinator|trainer|rollout", {RUN}}}[$window])',
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
    ),
)

BOARD = Board(
    uid="tandem-fleet",
    title="Tandem: fleet",
    help="The rollout replicas, how busy they are, and the processes of the run.",
    rows=(_REPLICAS, _PROCESSES),
)
