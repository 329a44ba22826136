"""The dashboard "Fleet": the replicas, their load, and the processes of the run."""

from tools.dashboards.panels import (
    COORDINATOR,
    ROLLOUT,
    RUN,
    Board,
    Row,
    Series,
    gauge,
    increase,
    panel,
    percentile,
    percentiles,
    rate,
)

_ALL_SERVICES = f'job=~"coordinator|trainer|rollout", {RUN}'

_REPLICAS = Row(
    title="Replicas",
    panels=(
        panel(
            "Replicas by state",
            "As replicas report it. Paused: during a sync; unseeded and poisoned: they wait for a sync.",
            Series(expr=f"sum by (state) (tandem_replica_state{{{ROLLOUT}}})", legend="{{state}}"),
            stacked=True,
        ),
        panel(
            "Announced and serving",
            "As the coordinator counts them. Different for long: see TandemReplicaNotServing.",
            gauge("tandem_announced_replicas", "announced"),
            gauge("tandem_serving_replicas", "serving"),
        ),
        panel(
            "Restarts",
            "Times that a replica has returned as a new process, and stuck pods that were evicted, since this "
            "coordinator started.",
            Series(expr=f"tandem_replica_starts_total{{{COORDINATOR}}} - 1", legend="{{replica}}"),
            gauge("tandem_replica_evictions_total", "evicted pods"),
        ),
        panel(
            "Tokens per second",
            "Sampled by each replica.",
            rate("tandem_generated_tokens_total", "{{replica}}", ROLLOUT, by="replica"),
            stacked=True,
        ),
        panel(
            "Queue",
            "Completions in an engine, and those of them that wait for room.",
            gauge("tandem_engine_requests", "{{replica}} all", ROLLOUT),
            gauge("tandem_engine_waiting_requests", "{{replica}} waiting", ROLLOUT),
        ),
        panel(
            "KV cache",
            "Share in use. Near 1 with a queue: the engine is limited by memory.",
            gauge("tandem_kv_cache_usage_ratio", "{{replica}}", ROLLOUT),
            unit="percentunit",
        ),
        panel(
            "Groups being generated",
            "Prompts in flight.",
            gauge("tandem_running_groups", "{{replica}}", ROLLOUT),
            stacked=True,
        ),
        panel(
            "Generate calls",
            "Seconds of a call; it lasts as long as its longest completion.",
            *percentiles("tandem_generate_seconds", 0.5, 0.95, selector=ROLLOUT, by="replica"),
            unit="s",
        ),
        panel(
            "Dispatch",
            "Times that dispatch waited since no replica was left, and replicas that joined during generation.",
            increase("tandem_dispatch_stalls_total", "stalls"),
            increase("tandem_dispatch_joiners_total", "joiners"),
            unit="short",
        ),
        panel(
            "Calls that failed",
            "Generate calls whose groups were generated again, here or on another replica.",
            increase("tandem_generate_retries_total", "retried"),
            unit="short",
        ),
    ),
)
_PROCESSES = Row(
    title="Processes",
    panels=(
        panel(
            "Scraped",
            "1 while Prometheus can read a service's metrics.",
            gauge("up", "{{job}} {{instance}}", _ALL_SERVICES),
        ),
        panel(
            "RPCs",
            "Per second, by service and status code.",
            rate("tandem_rpc_total", "{{job}} {{code}}", RUN, by="job, code"),
            unit="reqps",
        ),
        panel(
            "Duration of RPCs",
            "Seconds for which a call was served, streams until their end; the longest 5 % are longer.",
            percentile(0.95, "tandem_rpc_seconds", "{{job}} {{method}} p95", RUN, by="job, method"),
            unit="s",
            logarithmic=True,
        ),
        panel(
            "Certificates",
            "Seconds until each service's certificate expires; nothing without TLS. See TandemCertificateExpires.",
            Series(
                expr=f"(tandem_tls_certificate_expiry_timestamp_seconds{{{RUN}}} > 0) - time()",
                legend="{{job}} {{instance}}",
            ),
            unit="s",
        ),
        panel(
            "Lease renewals that failed",
            "By reason: Redis did not answer, the lease had expired, another worker has it.",
            increase("tandem_lease_renewals_failed_total", "{{job}} {{reason}}", RUN, by="job, reason"),
            unit="short",
        ),
        panel(
            "Disk of the run's folder",
            "Share that is free.",
            Series(expr=f"tandem_run_dir_free_bytes{{{RUN}}} / tandem_run_dir_size_bytes{{{RUN}}}", legend="{{job}}"),
            unit="percentunit",
        ),
        panel(
            "Memory",
            "Resident bytes of each service's own process (an engine's ranks are further processes).",
            gauge("process_resident_memory_bytes", "{{job}} {{instance}}", _ALL_SERVICES),
            unit="bytes",
        ),
        panel(
            "Processor",
            "Cores that each service's own process uses.",
            Series(expr=f"rate(process_cpu_seconds_total{{{_ALL_SERVICES}}}[$window])", legend="{{job}} {{instance}}"),
        ),
    ),
)

BOARD = Board(
    uid="tandem-fleet",
    title="Tandem: fleet",
    help="The rollout replicas, their load, and the processes of the run.",
    rows=(_REPLICAS, _PROCESSES),
)
