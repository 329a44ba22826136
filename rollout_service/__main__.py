"""`python -m rollout_service --config FILE --name rollout-0`: one SGLang replica as a gRPC service.

TANDEM_HOST_INDEX says which host of the engine this is: 0 (the default) is the replica, the others are its workers.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import sys
from pathlib import Path

# Garbage collection takes a quarter of the time of imports; it is enabled again once the engine (the rank) is up.
gc.disable()


def main() -> int:
    """Run the service. Returns: the exit code (servicekit.lifecycle.exit_codes)."""
    parser = argparse.ArgumentParser(prog="rollout_service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--name", required=True, help="name of the replica, unique in the run: rollout-0")
    arguments = parser.parse_args()

    from rollout_service.hosts.host_ranks import HOST_INDEX, HostRanks, process_name
    from rollout_service.sglang_cpu.forked_ranks import fork_ranks
    from servicekit.environment import ServiceEnvironment
    from servicekit.errors import ConfigError
    from servicekit.lifecycle.termination import run_main
    from tandem_config.loading import load_config

    with contextlib.suppress(ConfigError):  # the service says it
        share, device = HostRanks.of(load_config(arguments.config), os.environ), ServiceEnvironment.from_env().device
        if device != "cuda" and fork_ranks(len(share.ranks)):
            return 0

    process = process_name(arguments.name, os.environ)
    role = "rollout" if process == arguments.name else "rollout-worker"

    async def service(stop: asyncio.Event) -> None:
        from rollout_service.app import serve
        from rollout_service.worker_app import serve_worker
        from servicekit.logs import configure_logging
        from tandem_files.run_folder import claim_run_dir

        configure_logging(role, replica=arguments.name, host=os.environ.get(HOST_INDEX))
        config = load_config(arguments.config)
        environment, share = ServiceEnvironment.from_env(), HostRanks.of(config, os.environ)
        if config.sync.transport == "disk" and config.sync.disk_folder is None:
            claim_run_dir(environment.run_dir, environment.run_id)  # the weights come in the run's folder
        if share.host > 0:
            await serve_worker(config, arguments.name, environment, stop, share)
        else:
            await serve(config, arguments.name, environment, stop)

    return run_main(role, service, name=process)


if __name__ == "__main__":
    sys.exit(main())
