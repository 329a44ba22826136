"""Prometheus metrics of every service: RPCs, leases, the run folder's disk, and the HTTP endpoint that serves them.

Prometheus asks for OpenMetrics, and gets it, with exemplars where traces are on (tracing.exemplar).
"""

import asyncio
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import prometheus_client

from servicekit.addresses import join_address
from servicekit.errors import ConfigError
from servicekit.http_server import HttpServer

# When each series was created: for a third more series it says what `up` and process_start_time_seconds say too.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

# The longest wait for a last scrape: as long as two of most scrapers.
LAST_SCRAPE_S = 45.0
_LOOK_S = 0.05

RPC_TOTAL = prometheus_client.Counter(
    "tandem_rpc_total", "RPCs served, by gRPC service, method and status code.", ["service", "method", "code"]
)
RPC_SECONDS = prometheus_client.Histogram(
    "tandem_rpc_seconds",
    "Seconds that an RPC was served for, streams until their end.",
    ["service", "method"],
    # From a status call (1 ms) to a train step of a large model (an hour). Coarse, because every service has dozens of
    # methods: they tell magnitudes, while sum and count give the mean.
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


GPUS = prometheus_client.Gauge("tandem_gpus", "GPUs that the ranks of this service hold; 0 on CPUs.")
TLS_EXPIRY = prometheus_client.Gauge(
    "tandem_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which this process's certificate expires; 0 without TLS.",
)


class Scrapes:
    """Knows when /metrics was read, so that a process can end after its last values were."""

    def __init__(self) -> None:
        self._begun_s: deque[float] = deque(maxlen=4)  # of the last scrapes that were answered

    def watched(self, application: WSGIApplication) -> WSGIApplication:
        """Wrap the application that answers scrapes."""

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            begun_s = time.monotonic()
            return _Answer(application(environ, start_response), lambda: self._begun_s.append(begun_s))

        return answer

    def patience_s(self) -> float:
        """Return how long to wait for the next scrape: twice the longest of the last pauses; 0: none is expected."""
        begun_s = list(self._begun_s)
        pauses_s = [later - earlier for earlier, later in pairwise(begun_s)]
        patience_s = min(2 * max(pauses_s, default=0.0), LAST_SCRAPE_S)
        expected = bool(pauses_s) and time.monotonic() - begun_s[-1] < patience_s
        return patience_s if expected else 0.0

    async def last(self, stop: asyncio.Event) -> bool:
        """Wait for a scrape that begins now or later, within patience_s, until `stop`. Returns: whether it came."""
        now_s = time.monotonic()
        deadline_s = now_s + self.patience_s()
        while all(begun_s < now_s for begun_s in list(self._begun_s)):
            if time.monotonic() >= deadline_s or stop.is_set():
                return False
            await asyncio.sleep(_LOOK_S)
        return True


class _Answer:
    """The body of an answer; calls `on_sent` when the server has sent it."""

    def __init__(self, body: Iterable[bytes], on_sent: Callable[[], object]) -> None:
        self._body, self._on_sent = body, on_sent

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        """Note the end; the server calls this after the last byte."""
        self._on_sent()


def serve_metrics(host: str, port: int = 0, scrapes: Scrapes | None = None) -> int:
    """Serve /metrics from a daemon thread.

    Args:
        scrapes: notes when they were read.
    Returns: the port, which the system chooses for 0.
    Raises: ConfigError: the address cannot be bound.
    """
    application = prometheus_client.make_wsgi_app()
    try:
        server = HttpServer(host, port, application if scrapes is None else scrapes.watched(application))
    except OSError as error:
        where = join_address(host, port)
        raise ConfigError(
            f"cannot serve metrics on {where} ({error}); set TANDEM_METRICS_PORT to a free port or to 0"
        ) from error
    server.start("metrics")
    return server.server_port
