"""`python -m servicekit.rpc.probe readiness`: checks the health of this container's service; exits 0 if it serves.

For health checks that are commands, as Docker's; Kubernetes checks over gRPC itself. Uses the plain health port
(TANDEM_HEALTH_PORT) if it is set, else the service's own (TANDEM_GRPC_PORT), on the loopback address; or on the address
of TANDEM_BIND_HOST, if the service listens on that alone.
"""

import os
import sys
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.addresses import ANY, LOOPBACK, WILDCARDS, join_address
from servicekit.rpc.health import LIVENESS, READINESS, SERVING

TIMEOUT_S = 3.0
_USAGE = (
    f"usage: python -m servicekit.rpc.probe {READINESS}|{LIVENESS}, with TANDEM_HEALTH_PORT or TANDEM_GRPC_PORT set"
)


def probe(what: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> str:
    """Check the health once.

    Returns: "" if the service serves, else a sentence for Docker's log of health checks.
    """
    port = environ.get("TANDEM_HEALTH_PORT") or environ.get("TANDEM_GRPC_PORT")
    if what not in (READINESS, LIVENESS) or not port:
        return _USAGE
    bound = environ.get("TANDEM_BIND_HOST", "").strip("[]")
    host = LOOPBACK if bound in ("", ANY, *WILDCARDS) else bound
    with grpc.insecure_channel(join_address(host, port)) as channel:
        request = health_pb2.HealthCheckRequest(service=what)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"port {port} does not answer: {error.code().name}"
    return "" if answer.status == SERVING else f"port {port}: {what} is not SERVING"


def main() -> int:
    """Print the result of the check. Returns: the exit code."""
    problem = probe(sys.argv[1] if len(sys.argv) == 2 else "", os.environ)
    if problem:
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
