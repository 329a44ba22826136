"""`python -m rollout_service.local_hosts --config FILE --name rollout-0`: all hosts of an engine on this machine.

`tandem run` starts it in the place of a replica with rollout.nodes > 1: each host is a `python -m rollout_service` with
its TANDEM_HOST_INDEX and its share of the visible GPUs. They end together; the exit code is that of the first that
failed.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_service.hosts.host_ranks import HOST_INDEX
from servicekit.life.lifecycle import run_main
from servicekit.logs import configure_logging, get_logger
from tandem_config.loading import load_config

# A leader drains for 20 s, and a worker waits for it; after that they are killed.
STOP_GRACE_S = 60.0
_GPUS = "CUDA_VISIBLE_DEVICES"

log = get_logger(__name__)


def host_environments(nodes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """What each host finds in its environment beside ours: which one it is, and its part of the GPUs that are visible.

    >>> host_environments(2, {"CUDA_VISIBLE_DEVICES": "4,5"})[1]
    {'TANDEM_HOST_INDEX': '1', 'CUDA_VISIBLE_DEVICES': '5'}
    """
    gpus = [gpu for gpu in environ.get(_GPUS, "").split(",") if gpu]
    each = len(gpus) // nodes
    found = [{HOST_INDEX: str(host)} for host in range(nodes)]
    if each:
        for host, variables in enumerate(found):
            variables[_GPUS] = ",".join(gpus[host * each : (host + 1) * each])
    return found


async def run_hosts(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    stop: asyncio.Event,
    *,
    end_s: float,
    grace_s: float = STOP_GRACE_S,
) -> int:
    """Runs a process for each environment (added to ours) until all have ended.

    Args:
        stop: passed on to all as SIGTERM. end_s: seconds that the others have to end by themselves after the first.
        grace_s: seconds from SIGTERM to SIGKILL.
    Returns: the exit code of the first that failed (128 + number for a signal), 0 if none did.
    """
    codes: list[int] = []

    async def run(host: int, variables: Mapping[str, str]) -> None:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables})
        processes.append(process)
        code = await process.wait()
        if code == -signal.SIGTERM and stop.is_set():
            code = 0  # asked to end before it could listen: it was still importing
        codes.append(code if code >= 0 else 128 - code)
        log.info("host ended", host=host, code=codes[-1])

    processes: list[asyncio.subprocess.Process] = []
    hosts = [asyncio.create_task(run(*each), name=f"host-{each[0]}") for each in enumerate(environments)]
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({stopped, *hosts}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        await asyncio.wait({*hosts}, timeout=end_s)
    stopped.cancel()
    for end in (asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill):
        for process in processes:
            if process.returncode is None:
                end(process)
        await asyncio.wait({*hosts}, timeout=grace_s)
    await asyncio.gather(*hosts)
    return next((code for code in codes if code), 0)


def main(arguments: list[str] | None = None) -> int:
    """Runs the hosts. Returns: 2 for a bad configuration; otherwise see run_hosts."""
    parser = argparse.ArgumentParser(prog="python -m rollout_service.local_hosts", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    parser.add_argument("--name", required=True, help="name of the replica, unique in the run: rollout-0")
    options = parser.parse_args(arguments)

    async def hosts(stop: asyncio.Event) -> int:
        configure_logging("rollout-hosts", replica=options.name)
        config = load_config(options.config)
        command = [sys.executable, "-P", "-m", "rollout_service", "--config", str(options.config)]
        environments = host_environments(config.rollout.nodes, os.environ)
        # Each notices the end of another within the lease's time, and says why.
        end_s = config.sync.lease_ttl_s + STOP_GRACE_S / 4
        return await run_hosts([*command, "--name", options.name], environments, stop, end_s=end_s)

    return run_main("rollout-hosts", hosts, name=options.name)


if __name__ == "__main__":
    sys.exit(main())
