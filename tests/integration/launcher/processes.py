"""Tiny real processes for the supervisor's tests, and a look at who is alive. No sleeps: everything is polled."""

import sys
from pathlib import Path

from launcher.run.supervisor import ProcessSpec
from tests.kit.waiting import until

START_S = 20.0

# What children do while they have nothing to do: `signal.pause` in a loop survives handled signals.
FOREVER = "\nwhile True:\n    signal.pause()\n"
_BEGIN = "import signal, sys, os, subprocess\n"
_SAY_PID = "open(sys.argv[1], 'w').write(str(os.getpid()))"

WAITS = _BEGIN + _SAY_PID + FOREVER
IGNORES_SIGTERM = _BEGIN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _SAY_PID + FOREVER
FAILS = "import sys\nprint('starting')\nprint('ValueError: out of cheese', file=sys.stderr)\nsys.exit(3)\n"
# A grandchild in a session of its own that ignores SIGTERM: the hardest one to find and to end.
_STARTS_GRANDCHILD = (
    f"{_BEGIN}subprocess.Popen([sys.executable, '-c', {IGNORES_SIGTERM!r}, sys.argv[1]], start_new_session=True)\n"
)
HAS_GRANDCHILD = _STARTS_GRANDCHILD + FOREVER
LEAVES_GRANDCHILD = (
    _STARTS_GRANDCHILD + "while not (os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1])):\n    pass\n"
)


def spec(tmp_path: Path, name: str, script: str, *, grace_s: float = 5.0, stage: int = 1) -> ProcessSpec:
    """A Python script as a process; its pid file is `<name>.pid`."""
    return ProcessSpec(
        name=name,
        command=[sys.executable, "-S", "-c", script, str(tmp_path / f"{name}.pid")],
        log=tmp_path / "logs" / f"{name}.log",
        grace_s=grace_s,
        stage=stage,
    )


def read_pid(tmp_path: Path, name: str) -> int:
    """The pid that the child wrote once it was ready."""
    file = tmp_path / f"{name}.pid"
    until(lambda: file.exists() and file.read_text() != "", START_S, f"{file}")
    return int(file.read_text())


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
