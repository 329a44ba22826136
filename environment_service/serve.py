"""The process of an environment server: health, reflection, TLS and token as a reward server has them, and a drain.

    TANDEM_GRPC_PORT=50071 python -m environment_service --function my_env.py:Guess --args '{"most": 100}'

and in the run's configuration

    environment: {address: "127.0.0.1:50071", security: none}
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from coordinator.environments.pool import EnvironmentPool
from environment_service.servicer import EnvironmentServicer
from servicekit.environment import ServerEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.tasks import first_of
from servicekit.lifecycle.termination import run_main
from servicekit.logs import get_logger
from servicekit.rpc.server import GrpcServer
from tandem_api.environment.v1 import environment_pb2 as pb
from tandem_api.environment.v1.environment_pb2_grpc import add_EnvironmentServiceServicer_to_server
from tandem_config.paths import anchored
from tandem_config.sections.environment import EnvironmentSection

ROLE = "environment"
SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
# How long a stopping server lets calls finish; a pod's grace period must be longer.
DRAIN_S = 20.0
# Options that are settings of the section `environment`, with the types of their values.
_NUMBERS = {"workers": int, "memory_mib": int, "turn_timeout_s": float, "start_timeout_s": float}

log = get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, where the environment says (TANDEM_BIND_HOST, TANDEM_GRPC_PORT, ...).

    Args:
        arguments: None: those of the process.
    Returns: the exit code, for sys.exit().
    """
    parser = argparse.ArgumentParser(prog="environment_service", description=__doc__.partition("\n")[0])
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--function", help="FILE.py:CLASS or package.module:CLASS")
    served.add_argument("--tools", nargs="+", default=(), help="functions, each FILE.py:FUNCTION or module:FUNCTION")
    parser.add_argument("--args", default="{}", help="JSON object: values for the constructor's parameters")
    for name, kind in _NUMBERS.items():
        default = EnvironmentSection.model_fields[name].default
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, default=default, help=f"as environment.{name}; default {default:g}")
    options = parser.parse_args(arguments)

    async def run(stop: asyncio.Event) -> None:
        await serve(section_of(options), ServerEnvironment.from_env(), stop)

    return run_main(ROLE, run)


def section_of(options: argparse.Namespace) -> EnvironmentSection:
    """Read the options; files are relative to the current folder. Raises: ConfigError: with each that is wrong."""
    given = vars(options)
    try:
        given |= {"args": json.loads(options.args)}
    except ValueError as error:
        raise ConfigError(f"--args is no JSON: {error}") from error
    references = {"function": options.function, "tools": list(options.tools)}
    given |= {name: anchored(f"environment.{name}", value, Path.cwd()) for name, value in references.items()}
    try:
        return EnvironmentSection.model_validate(given)
    except ValidationError as error:
        found = [("".join(map(str, fault["loc"][:1])), fault["msg"]) for fault in error.errors()]
        named = [f"--{name.replace('_', '-')}: {text}" if name else f"it {text}" for name, text in found]
        raise ConfigError("; ".join(named)) from error


async def serve(section: EnvironmentSection, variables: ServerEnvironment, stop: asyncio.Event) -> None:
    """Serve until `stop`; ready once the code is imported. Raises: ConfigError: it, or an address, cannot be used."""
    identity = variables.identity(ROLE)
    server = GrpcServer(ROLE, bind=variables.bind, identity=identity, health_bind=variables.health_bind)
    servicer = EnvironmentServicer(EnvironmentPool(section), section.label)
    server.add(add_EnvironmentServiceServicer_to_server, servicer, SERVICE)
    await server.start()
    try:
        if (await first_of({"stop": stop, "load": servicer.load()})).name == "load":
            server.set_ready(True)
            log.info("environment ready", environment=section.label, workers=section.workers)
            await stop.wait()
    finally:
        await server.drain(DRAIN_S)
        await servicer.close()
