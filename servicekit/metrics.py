"""Prometheus metrics of every service: RPCs, leases, the run folder's disk, and the HTTP endpoint that serves them."""

import math
import shutil
from pathlib import Path

import prometheus_client

from servicekit.errors import ConfigError
from servicekit.http_server import HttpServer

RPC_TOTAL = prometheus_client.Counter(
    "tandem_rpc_total", "RPCs served, by gRPC service, method and status code.", ["service", "method", "code"]
)
RPC_SECONDS = prometheus_client.Histogram(
    "tandem_rpc_seconds",
    "Seconds that an RPC was served for, streams until their end.",
    ["service", "method"],
    # From a status call (1 ms) to a train step of a large model (an hour).
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600),
)

LEASE_FAILURES = prometheus_client.Counter(
    "tandem_lease_renewals_failed_total",
    "Renewals that failed, by kind (record: in the registry, slot: in the weight group) and reason (unavailable: Redis "
    "did not answer, expired: it had run out and was taken again, lost: another worker has it).",
    ["kind", "reason"],
)
for _kind in ("record", "slot"):
    for _reason in ("unavailable", "expired", "lost"):
        # Exported from 0 on: for a counter that appears with its first event, an alert would see no increase.
        LEASE_FAILURES.labels(_kind, _reason)
_DISK_FREE = prometheus_client.Gauge("tandem_run_dir_free_bytes", "Bytes free on the file system of the run's folder.")
_DISK_SIZE = prometheus_client.Gauge("tandem_run_dir_size_bytes", "Size of the file system of the run's folder.")


def export_disk_of(folder: Path) -> None:
    """Export free space and size of the file system of `folder`, read at every scrape; NaN if that fails."""
    _DISK_FREE.set_function(lambda: _disk_usage(folder)[0])
    _DISK_SIZE.set_function(lambda: _disk_usage(folder)[1])


def _disk_usage(folder: Path) -> tuple[float, float]:
    """Return (free, size) in bytes; free is what an ordinary user can still write."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return math.nan, math.nan
    return float(usage.free), float(usage.total)


TLS_EXPIRY = prometheus_client.Gauge(
    "tandem_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which this process's certificate expires; 0 without TLS.",
)


def serve_metrics(host: str, port: int = 0) -> int:
    """Serve /metrics from a daemon thread.

    Returns: the port, which the system chooses for 0.
    Raises: ConfigError: the address cannot be bound.
    """
    try:
        server = HttpServer(host, port, prometheus_client.make_wsgi_app())
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port} ({error}); set TANDEM_METRICS_PORT to a free port or to 0"
        ) from error
    server.start("metrics")
    return server.server_port
