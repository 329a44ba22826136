"""`python -m trainer_service.host --config FILE [--resume]`: all ranks of the trainer that belong on this host.

The first process of the trainer's container. Each rank is a `python -m trainer_service` with RANK, LOCAL_RANK and
WORLD_SIZE; the ranks of all hosts find each other through the registry. SIGTERM goes to every rank. When one rank
ends, so do the others, and the exit code is that of the first that failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servicekit.errors import ConfigError
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from servicekit.logs import configure_logging, get_logger
from tandem_config.loading import load_config

PER_HOST, HOST_INDEX = "TANDEM_RANKS_PER_HOST", "TANDEM_HOST_INDEX"
# A rank drains for 30 s, then all ranks have as long to stop (trainer_service.app); after that they are killed.
STOP_GRACE_S = 70.0

log = get_logger(__name__)


def ranks_here(environ: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    """What each rank of this host finds in its environment.

    Args:
        environ: TANDEM_RANKS_PER_HOST (unset: all ranks are here), TANDEM_HOST_INDEX (unset: 0).
    Raises: ConfigError: a value is no number, the hosts do not divide the ranks evenly, or there is no such host.

    >>> ranks_here({"TANDEM_RANKS_PER_HOST": "2", "TANDEM_HOST_INDEX": "1"}, 4)[0]
    {'RANK': '2', 'LOCAL_RANK': '0', 'WORLD_SIZE': '4'}
    """
    per_host = _number(environ, PER_HOST, world_size)
    host = _number(environ, HOST_INDEX, 0)
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


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise ConfigError(f"environment variable {name}={environ[name]!r} is not a whole number") from None


@dataclass(kw_only=True)
class RankProcesses:
    """The rank processes, from start to the last one's end. Lives on the main thread, where signals are handled."""

    grace_s: float = STOP_GRACE_S
    _names: dict[int, str] = field(default_factory=dict, init=False)
    # Kept: a Popen that nobody holds is waited for by the next one, and its exit code is lost.
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _failed: int = field(default=EXIT_OK, init=False)
    _asked: bool = field(default=False, init=False)

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Starts a process for each environment (added to ours) and waits for all.

        Returns: the exit code of the first that failed (128 + number for a signal), 0 if none did.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self._stop(signal.Signals(received).name))
        signal.signal(signal.SIGALRM, lambda *_: self._signal(signal.SIGKILL))
        for environment in environments:
            # Not our group: Ctrl-C in a terminal is ours to pass on, once.
            child = subprocess.Popen(command, env={**os.environ, **environment}, process_group=0)
            self._children.append(child)
            self._names[child.pid] = f"rank {environment['RANK']}"
            if self._asked:  # while this one was being started
                self._signal(signal.SIGTERM)
        while self._names:
            # As a container's first process we also inherit orphans; they are collected and forgotten here.
            pid, status = os.wait()
            name = self._names.pop(pid, None)
            if name is not None:
                self._ended(name, os.waitstatus_to_exitcode(status))
        return self._failed

    def _ended(self, name: str, code: int) -> None:
        if code == -signal.SIGTERM and self._asked:
            code = EXIT_OK  # asked to end before it could listen: it was still importing
        code = code if code >= 0 else 128 - code
        log.info("trainer process ended", process=name, code=code)
        self._failed = self._failed or code
        if self._names:
            self._stop(f"the end of {name}")

    def _stop(self, why: str) -> None:
        """Asks every process to end, and kills those that have not after the grace period."""
        if not self._asked:
            self._asked = True
            log.info("stopping the ranks", why=why)
            self._signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._names:
            # Ended, and about to be collected.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def main(arguments: list[str] | None = None) -> int:
    """Runs the ranks. Returns: 2 for a bad configuration; otherwise see Ranks.run."""
    parser = argparse.ArgumentParser(prog="python -m trainer_service.host", description="All trainer ranks of a host.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration file (YAML)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    options = parser.parse_args(arguments)
    configure_logging("trainer", rank="host")
    try:
        environments = ranks_here(os.environ, load_config(options.config).trainer.world_size)
    except ConfigError as error:
        log.error("bad configuration", error=str(error))
        return EXIT_BAD_CONFIG
    command = [sys.executable, "-m", "trainer_service", "--config", str(options.config)]
    return RankProcesses().run([*command, "--resume"] if options.resume else command, environments)


if __name__ == "__main__":
    sys.exit(main())
