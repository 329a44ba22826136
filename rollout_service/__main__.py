"""`python -m rollout_service --config FILE --name rollout-0`: one SGLang replica as a gRPC service."""

import argparse
import asyncio
import gc
import sys
from pathlib import Path

# SGLang's ranks are spawned processes that import this module first: it must stay light, imports are in main().
# Collecting garbage while importing is a fifth of the import's time; on again once the engine (the rank) is up.
gc.disable()


def main() -> int:
    """Run the service; returns the exit code (servicekit.lifecycle)."""
    parser = argparse.ArgumentParser(prog="rollout_service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--name", required=True, help="name of the replica, unique in the run: rollout-0")
    arguments = parser.parse_args()

    from servicekit.lifecycle import run_main

    async def service(stop: asyncio.Event) -> None:
        from rollout_service.app import serve
        from servicekit.environment import ServiceEnvironment
        from servicekit.errors import ConfigError
        from servicekit.logs import configure_logging
        from tandem_config.loading import load_config
        from tandem_config.problems import ConfigErrors

        configure_logging("rollout", name=arguments.name)
        try:
            config = load_config(arguments.config)
        except ConfigErrors as error:
            raise ConfigError(str(error)) from None
        await serve(config, arguments.name, ServiceEnvironment.from_env(), stop)

    return run_main("rollout", service, name=arguments.name)


if __name__ == "__main__":
    sys.exit(main())
