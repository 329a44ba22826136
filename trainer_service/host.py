"""`python -m trainer_service.host --config FILE [--resume]`: all ranks of the trainer that belong on this host.

The first process of the trainer's container. It starts each rank as a `python -m trainer_service` with RANK, LOCAL_RANK
and WORLD_SIZE; the ranks of all hosts find each other through the registry. SIGTERM goes to every rank. When one rank
ends, the others are ended too, and the exit code is that of the first that failed. A Job (of a JobSet) takes 0 for "the
work is done". So there a trainer that a signal has ended exits with another code (--interrupted-exit).
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from servicekit.environment import whole_number
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_OK
from servicekit.lifecycle.processes import Program, run_together
from servicekit.lifecycle.termination import run_main
from servicekit.logs import configure_logging
from tandem_config.loading import load_config

PER_HOST, HOST_INDEX = "TANDEM_RANKS_PER_HOST", "TANDEM_HOST_INDEX"
# Behind run.stop_timeout_s, in which the coordinator saves, a rank drains for 30 s, then all ranks have as long to stop
# (trainer_service.app); after that they are killed.
STOP_GRACE_S = 70.0


def ranks_here(environ: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    """Make the environment variables of each rank of this host.

    Args:
        environ: TANDEM_RANKS_PER_HOST (unset: all ranks are here), TANDEM_HOST_INDEX (unset: 0).
    Raises: ConfigError: a value is not a number, the hosts do not divide the ranks evenly, or no host has this index.

    >>> ranks_here({"TANDEM_RANKS_PER_HOST": "2", "TANDEM_HOST_INDEX": "1"}, 4)[0]
    {'RANK': '2', 'LOCAL_RANK': '0', 'WORLD_SIZE': '4'}
    """
    per_host = whole_number(environ, PER_HOST, world_size)
    host = whole_number(environ, HOST_INDEX, 0)
    if per_host < 1 or world_size % per_host != 0:
        raise ConfigError(f"{PER_HOST}={per_host} does not divide the trainer's {world_size} ranks")
    if not 0 <= host < world_size // per_host:
        raise ConfigError(
            f"{HOST_INDEX}={host}: {world_size} ranks, {per_host} on each host, are hosts 0 to "
            f"{world_size // per_host - 1}"
        )
    return [
        {"RANK": str(host * per_host + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world_size)}
        for local in range(per_host)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the ranks. Returns: 2 for a bad configuration; otherwise see run_together."""
    parser = argparse.ArgumentParser(prog="python -m trainer_service.host", description="All trainer ranks of a host.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration file (YAML)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--interrupted-exit", type=int, default=EXIT_OK, help="exit code after a signal; default 0")
    options = parser.parse_args(arguments)

    async def ranks(stop: asyncio.Event) -> int:
        configure_logging("trainer", rank="host")
        config = load_config(options.config)
        environments = ranks_here(os.environ, config.trainer.world_size)
        command = [sys.executable, "-m", "trainer_service", "--config", str(options.config)]
        command += ["--resume"] if options.resume else []
        programs = [Program(name=f"rank {env['RANK']}", command=command, env=env) for env in environments]
        code = await run_together(programs, stop, grace_s=config.run.stop_timeout_s + STOP_GRACE_S)
        return int(options.interrupted_exit) if code == EXIT_OK and stop.is_set() else code

    return run_main("trainer", ranks, loop_factory=asyncio.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
