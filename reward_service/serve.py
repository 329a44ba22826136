"""The process of a reward server: health, reflection, TLS and token as the run's services have them, and a drain."""

import asyncio
from collections.abc import Callable

from reward_service.scorer import RewardScorer
from reward_service.servicer import FULL_NAME, RewardServicer
from servicekit.environment import ServerEnvironment
from servicekit.lifecycle.tasks import first_of
from servicekit.lifecycle.termination import run_main
from servicekit.logs import get_logger
from servicekit.rpc.server import GrpcServer
from tandem_api.reward.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server

ROLE = "reward"
# How long a stopping server lets calls finish; a pod's grace period must be longer.
DRAIN_S = 20.0

log = get_logger(__name__)


def run_reward_server(make_scorer: Callable[[], RewardScorer]) -> int:
    """Serve a scorer until SIGTERM, where the environment says (TANDEM_BIND_HOST, TANDEM_GRPC_PORT, ...).

    Args:
        make_scorer: the class of the scorer, or what makes one.
    Returns: the exit code, for sys.exit().
    """
    return run_main(ROLE, lambda stop: serve(make_scorer(), ServerEnvironment.from_env(), stop))


async def serve(scorer: RewardScorer, environment: ServerEnvironment, stop: asyncio.Event) -> None:
    """Serve until `stop`; ready once the scorer has loaded. Raises: ConfigError: a wrong address or certificate."""
    identity = environment.identity(ROLE)
    server = GrpcServer(ROLE, bind=environment.bind, identity=identity, health_bind=environment.health_bind)
    servicer = RewardServicer(scorer)
    server.add(add_RewardServiceServicer_to_server, servicer, FULL_NAME)
    await server.start()
    try:
        if (await first_of({"stop": stop, "load": servicer.load()})).name == "load":
            server.set_ready(True)
            log.info("scorer ready", scorer=scorer.name, version=scorer.version)
            await stop.wait()
    finally:
        await server.drain(DRAIN_S)
        servicer.close()
