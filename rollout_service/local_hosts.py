"""`python -m rollout_service.local_hosts --config FILE --name rollout-0`: run all hosts of an engine on this machine.

`tandem run` starts it in place of a replica with rollout.nodes > 1: each host is a `python -m rollout_service` with
its TANDEM_HOST_INDEX and its share of the visible GPUs. They end together; the exit code is that of the first that
failed.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rollout_service.hosts.host_ranks import HOST_INDEX
from servicekit.lifecycle.processes import Program, run_together
from servicekit.lifecycle.termination import run_main
from servicekit.logs import configure_logging
from tandem_config.loading import load_config

# A leader drains for 20 s while its workers wait; after this long they are killed.
STOP_GRACE_S = 60.0
_GPUS = "CUDA_VISIBLE_DEVICES"


def host_environments(nodes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that each host gets on top of ours: its index, and its share of the visible GPUs.

    >>> host_environments(2, {"CUDA_VISIBLE_DEVICES": "4,5"})[1]
    {'TANDEM_HOST_INDEX': '1', 'CUDA_VISIBLE_DEVICES': '5'}
    """
    gpus = [gpu for gpu in environ.get(_GPUS, "").split(",") if gpu]
    gpus_per_host = len(gpus) // nodes
    environments = [{HOST_INDEX: str(host)} for host in range(nodes)]
    if gpus_per_host:
        for host, variables in enumerate(environments):
            variables[_GPUS] = ",".join(gpus[host * gpus_per_host : (host + 1) * gpus_per_host])
    return environments


def main(arguments: list[str] | None = None) -> int:
    """Run the hosts. Returns: 2 for a bad configuration; otherwise the exit code of run_together()."""
    parser = argparse.ArgumentParser(prog="python -m rollout_service.local_hosts", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--name", required=True, help="name of the replica, unique in the run: rollout-0")
    options = parser.parse_args(arguments)

    async def hosts(stop: asyncio.Event) -> int:
        configure_logging("rollout-hosts", replica=options.name)
        config = load_config(options.config)
        command = [sys.executable, "-P", "-m", "rollout_service", "--config", str(options.config)]
        command += ["--name", options.name]
        environments = host_environments(config.rollout.nodes, os.environ)
        programs = [Program(name=f"host {env[HOST_INDEX]}", command=command, env=env) for env in environments]
        # A host notices within the lease time that another has ended, and logs why.
        alone_s = config.sync.lease_ttl_s + STOP_GRACE_S / 4
        return await run_together(programs, stop, grace_s=STOP_GRACE_S, alone_s=alone_s)

    return run_main("rollout-hosts", hosts, name=options.name, loop_factory=asyncio.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
