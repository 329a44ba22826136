"""`python -m coordinator --config FILE [--resume] [--standby] [--interrupted-exit CODE] [--retry-exit CODE]`.

Coordinates one run. With --standby it waits first until no other coordinator leads the run.

servicekit.lifecycle.exit_codes has the exit codes. A Kubernetes Job takes 0 for "the run is complete", so there a run
that a signal has interrupted exits with another code; and it counts failures over its whole life. So there a failure
exits with a code that it ignores, unless the coordinator itself has counted too many in a row. Nor does a standby that
cannot work end a run that another coordinator leads.
"""

import argparse
import asyncio
import gc
import sys
from pathlib import Path

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from servicekit.lifecycle.termination import run_main
from servicekit.logs import get_logger
from tandem_config.loading import load_config

log = get_logger(__name__)


def main() -> int:
    """Parse the command line and run the coordinator to its exit code."""
    gc.disable()  # until it has started (app.py)
    from coordinator.app import conduct
    from coordinator.leader_lease import is_led
    from coordinator.retries import code_after_failure
    from coordinator.shutdown import Exits

    parser = argparse.ArgumentParser(prog="coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument("--standby", action="store_true", help="wait until no other coordinator leads it, then resume")
    parser.add_argument("--interrupted-exit", type=int, default=EXIT_OK, help="exit code after a signal; default 0")
    parser.add_argument("--retry-exit", type=int, default=None, help="exit code after a failure worth another attempt")
    options = parser.parse_args()
    exits = Exits(interrupted=options.interrupted_exit, retry=options.retry_exit)

    def is_spare(*, unknown: bool) -> bool:
        if not options.standby or exits.retry is None:
            return False
        return is_led(ServiceEnvironment.from_env(), unknown=unknown)

    async def run(stop: asyncio.Event) -> int:
        try:
            config = load_config(options.config)
            environment = ServiceEnvironment.from_env()
            kind = {"resume": options.resume, "standby": options.standby}
            return await conduct(config, environment, stop=stop, exits=exits, **kind)
        except ConfigError as error:
            if exits.retry is None or not await asyncio.to_thread(is_spare, unknown=True):
                raise
            log.error("standby cannot work; the run continues without it", error=str(error))
            return exits.retry

    def failed() -> int:
        try:
            run_dir = ServiceEnvironment.from_env().run_dir
            if exits.retry is not None and is_spare(unknown=False):
                return exits.retry
        except ConfigError:  # something else has failed before it was read
            return EXIT_FAILED
        return code_after_failure(run_dir, None, exits, otherwise=EXIT_FAILED)

    return run_main("coordinator", run, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
