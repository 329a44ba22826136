"""Prometheus metrics of every service: those of its RPCs, and the HTTP endpoint that serves them all."""

import prometheus_client

from servicekit.errors import ConfigError

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


def serve_metrics(host: str, port: int = 0) -> int:
    """Serves /metrics from a daemon thread; returns the port, chosen by the system for 0.

    Raises: ConfigError: the address cannot be bound.
    """
    try:
        server, _ = prometheus_client.start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port} ({error}); set TANDEM_METRICS_PORT to a free port or to 0"
        ) from error
    return int(server.server_port)
