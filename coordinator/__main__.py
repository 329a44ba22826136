"""`python -m coordinator --config FILE [--resume] [--interrupted-exit CODE] [--retry-exit CODE]`: coordinates one run.

servicekit.lifecycle.exit_codes has the exit codes. A Kubernetes Job takes 0 for "the run is complete", so there a run
that a signal has interrupted exits with another code; and it counts failures over its whole life. So there a failure
exits with a code that it ignores, unless the coordinator itself has counted too many in a row.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from coordinator.app import conduct
from coordinator.retries import code_after_failure
from coordinator.shutdown import Exits
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from servicekit.lifecycle.termination import run_main
from tandem_config.loading import load_config


def main() -> int:
    """Parse the command line and run the coordinator to its exit code."""
    parser = argparse.ArgumentParser(prog="coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument("--interrupted-exit", type=int, default=EXIT_OK, help="exit code after a signal; default 0")
    parser.add_argument("--retry-exit", type=int, default=None, help="exit code after a failure worth another attempt")
    options = parser.parse_args()
    exits = Exits(interrupted=options.interrupted_exit, retry=options.retry_exit)

    async def run(stop: asyncio.Event) -> int:
        config = load_config(options.config)
        environment = ServiceEnvironment.from_env()
        return await conduct(config, environment, resume=options.resume, stop=stop, exits=exits)

    def failed() -> int:
        try:
            run_dir = ServiceEnvironment.from_env().run_dir
        except ConfigError:  # something else has failed before it was read
            return EXIT_FAILED
        return code_after_failure(run_dir, None, exits, otherwise=EXIT_FAILED)

    return run_main("coordinator", run, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
