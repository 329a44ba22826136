"""`python -m coordinator --config FILE [--resume] [--interrupted-exit CODE]`: coordinates one run, then exits.

Exit codes are those of servicekit.life.exit_codes. A Kubernetes Job takes 0 for "the run is complete", so there a run
that a signal has interrupted exits with another code.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.life.exit_codes import EXIT_OK
from servicekit.life.lifecycle import run_main
from tandem_config.loading import load_config


def main() -> int:
    """Parse the command line and run the coordinator to its exit code."""
    parser = argparse.ArgumentParser(prog="coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument("--interrupted-exit", type=int, default=EXIT_OK, help="exit code after a signal; default 0")
    options = parser.parse_args()

    async def run(stop: asyncio.Event) -> int:
        config = load_config(options.config)
        environment = ServiceEnvironment.from_env()
        code = await conduct(config, environment, resume=options.resume, stop=stop)
        return options.interrupted_exit if code == EXIT_OK and stop.is_set() else code

    return run_main("coordinator", run)


if __name__ == "__main__":
    sys.exit(main())
