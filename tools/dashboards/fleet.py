"""The dashboard "Fleet": the replicas, their load, and the processes of the run."""

from tools.dashboards.panels import (
    COORDINATOR,
    REPLICA,
    ROLLOUT,
    RUN,
    Board,
    Row,
    Series,
    gauge,
    heatmap,
    increase,
    mean,
    panel,
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
            "Expected, announced, serving",
            "Replicas, as the coordinator counts them. Fewer announced than expected: TandemReplicasMissing. Fewer "
            "serving than announced, for long: TandemReplicaNotServing.",
            gauge("tandem_expected_replicas", "expected"),
            gauge("tandem_replicas_wanted", "wanted"),
            gauge("tandem_announced_replicas", "announced"),
            gauge("tandem_serving_replicas", "serving"),
            alert="TandemReplicasMissing",
        ),
        panel(
            "Restarts",
            "Times that a replica has returned as a new process, and stuck pods that were evicted, since this "
            "coordinator started.",
            Series(expr=f"topk(8, tandem_replica_starts_total{{{COORDINATOR}, {REPLICA}}} - 1)", legend="{{replica}}"),
            gauge("tandem_replica_evictions_total", "evicted pods"),
            alert="TandemReplicaFlapping",
        ),
        panel(
            "Tokens per second",
            "Sampled by each replica.",
            rate("tandem_generated_tokens_total", "{{replica}}", ROLLOUT, by="replica"),
            stacked=True,
        ),
        panel(
            "Queue",
            "Completions in the chosen engines, those of them that wait for room, and where most wait.",
            Series(expr=f"sum (tandem_engine_requests{{{ROLLOUT}}})", legend="all"),
            Series(expr=f"sum (tandem_engine_waiting_requests{{{ROLLOUT}}})", legend="waiting"),
            Series(expr=f"topk(3, tandem_engine_waiting_requests{{{ROLLOUT}}})", legend="{{replica}} waiting"),
            alert="TandemEngineQueue",
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
            "Seconds of a call to one of the chosen replicas; it lasts as long as its longest completion.",
            *percentiles("tandem_generate_seconds", 0.5, 0.95, 0.99, selector=ROLLOUT),
            unit="s",
        ),
        heatmap("Calls by duration", "How many calls took how long.", "tandem_generate_seconds", ROLLOUT),
        panel(
            "Dispatch",
            "Times that dispatch waited since no replica was left, and replicas that joined during generation.",
            increase("tandem_dispatch_stalls_total", "stalls"),
            increase("tandem_dispatch_joiners_total", "joiners"),
            unit="short",
        ),
        panel(
            "Seeding of joiners",
            "Mean seconds until replicas that joined had the weights, by what sent them.",
            mean("tandem_joiner_seeding_seconds", "from {{sender}}", by="sender"),
            unit="s",
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
            "1 while Prometheus can read a service's metrics. What has gone has no line: see Presence in the runbook.",
            gauge("up", "{{job}} {{instance}}", _ALL_SERVICES),
            alert="TandemServiceDown",
        ),
        panel(
            "GPUs held",
            "By the ranks of each kind of service. Of a run that is over: see TandemGpusHeld.",
            Series(expr=f'sum by (job) (tandem_gpus{{job=~"trainer|rollout", {RUN}}})', legend="{{job}}"),
            alert="TandemGpusHeld",
        ),
        panel(
            "RPCs",
            "Per second, by service and status code.",
            rate("tandem_rpc_total", "{{job}} {{code}}", RUN, by="job, code"),
            unit="reqps",
        ),
        panel(
            "Duration of RPCs",
            "Mean seconds for which a call was served, streams until their end. The buckets of tandem_rpc_seconds are "
            "too coarse for quantiles.",
            mean("tandem_rpc_seconds", "{{job}} {{method}}", RUN, by="job, method"),
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
            alert="TandemCertificateExpires",
        ),
        panel(
            "Lease renewals that failed",
            "By reason: Redis did not answer, the lease had expired, another worker has it.",
            increase("tandem_lease_renewals_failed_total", "{{job}} {{reason}}", RUN, by="job, reason"),
            unit="short",
            alert="TandemLeaseTrouble",
        ),
        panel(
            "Disk of the run's folder",
            "Share that is free.",
            # Rollouts do not use the folder: of theirs the size is 0.
            Series(
                expr=f"tandem_run_dir_free_bytes{{{RUN}}} / (tandem_run_dir_size_bytes{{{RUN}}} > 0)", legend="{{job}}"
            ),
            unit="percentunit",
            alert="TandemDiskFilling",
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
