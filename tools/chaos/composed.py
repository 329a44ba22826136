"""A run without the launcher, as compose or a cluster has it: its trainer and replicas, and two coordinators.

    python -m tools.chaos.composed -c FILE --set run.name=NAME --set ...

Each process that ends with a failure is started again. SIGINT ends the coordinators, then all others.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tandem_config.loading import draft_config, dump_resolved

_AGAIN_S = 1.0
_LOOK_S = 0.1
_ENDS_S = 90.0
LEADERS = ("coordinator-0", "coordinator-1")


@dataclass(kw_only=True)
class Composed:
    """The processes.

    Attributes:
        commands: by name, with the variables of each.
    """

    folder: Path
    commands: dict[str, tuple[list[str], dict[str, str]]]
    ending: bool = False
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a process, with its log."""
        command, variables = self.commands[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *command], env={**os.environ, **variables}, stdout=log, stderr=log
            )

    def keep(self) -> bool:
        """Start again what has failed. Returns: whether the run is over: a coordinator has ended with 0."""
        for name, process in self.running.items():
            code = process.poll()
            if code == 0 and name in LEADERS:
                return True
            if code is not None:
                ended_s = self.ended_s.setdefault(name, time.monotonic())
                if time.monotonic() - ended_s >= _AGAIN_S:
                    print(f"{name} has ended with {code}, it starts again", flush=True)
                    del self.ended_s[name]
                    self.start(name)
        return False

    def end(self) -> list[int]:
        """End all, the coordinators first. Returns: the coordinators' exit codes."""
        for names in (LEADERS, self.commands.keys() - LEADERS):
            for name in names:
                self.running[name].send_signal(signal.SIGTERM)
            for name in names:
                self.running[name].wait(_ENDS_S)
        return [self.running[name].returncode for name in LEADERS]


def main() -> int:
    """Run it. Returns: 0; 1: a coordinator has ended with a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-c", dest="file", type=Path, required=True)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    draft = draft_config(options.file, options.settings)
    config = draft.config
    if config is None:
        raise SystemExit("\n".join(map(str, draft.problems)))
    run_dir = Path(config.run.output_dir) / config.run.name
    folder = run_dir.parent / "logs"
    for made in (run_dir, folder):
        made.mkdir()
    file = folder / "config.yaml"
    file.write_text(dump_resolved(config), encoding="utf-8")
    own = {"TANDEM_RUN_ID": config.run.name, "TANDEM_RUN_DIR": str(run_dir), "TANDEM_BIND_HOST": "127.0.0.1"}
    given = ["--config", str(file)]
    commands = {name: (["coordinator", *given, "--resume", "--standby"], own) for name in LEADERS}
    for number in range(config.rollout.replicas):
        scratch = folder / f"rollout-{number}"
        scratch.mkdir()
        commands[scratch.name] = (["rollout_service", *given, "--name", scratch.name], own | {"TMPDIR": str(scratch)})
    for rank in range(config.trainer.world_size):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(config.trainer.world_size), "LOCAL_RANK": str(rank)}
        commands[f"trainer-{rank}"] = (["trainer_service", *given], own | ranks)
    composed = Composed(folder=folder, commands=commands)

    def stop(*_: object) -> None:
        composed.ending = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for name in commands:
        composed.start(name)
    while not composed.ending and not composed.keep():
        time.sleep(_LOOK_S)
    codes = composed.end()
    print(f"coordinators have ended with {codes}", flush=True)
    return 0 if set(codes) <= {0, 128 + signal.SIGTERM, 128 + signal.SIGINT} else 1


if __name__ == "__main__":
    sys.exit(main())
