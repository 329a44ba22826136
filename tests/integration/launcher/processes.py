"""Tiny real processes for the supervisor's tests, and a look at who is alive. No sleeps: everything is polled."""

import sys
from pathlib import Path

from launcher.run.supervisor import ProcessSpec
from tests.kit.waiting import until

START_S = 20.0

# What children do while they have nothing to do: `signal.pause` in a loop survives handled signals.
_IDLE = "import signal, sys, os, subprocess\n"
_FOREVER = "\nwhile True:\n    signal.pause()\n"

WAITS = _IDLE + "open(sys.argv[1], 'w').write(str(os.getpid()))" + _FOREVER
IGNORES_SIGTERM = (
    _IDLE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(sys.argv[1], 'w').write(str(os.getpid()))" + _FOREVER
)
FAILS = "import sys\nprint('starting')\nprint('ValueError: out of cheese', file=sys.stderr)\nsys.exit(3)\n"
SUCCEEDS = "pass"
# Succeeds once its neighbour trainer-0 has written its pid: a test can then ask what became of that one.
SUCCEEDS_AFTER_TRAINER = (
    "import os, sys\nother = os.path.join(os.path.dirname(sys.argv[1]), 'trainer-0.pid')\n"
    "while not (os.path.exists(other) and os.path.getsize(other)):\n    pass\n"
)
# Each start adds a line to the pid file. A trainer that fails at its first start, as soon as the coordinator runs; a
# coordinator that succeeds at its second, when all trainers have had theirs.
_COUNTED = (
    _IDLE + "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n" + "start = len(open(sys.argv[1]).readlines())\n"
)
FAILS_ONCE = (
    _COUNTED
    + "other = os.path.join(os.path.dirname(sys.argv[1]), 'coordinator.pid')\n"
    + "while start == 1 and not os.path.exists(other):\n    pass\n"
    + "if start == 1:\n    sys.exit(3)\n"
    + _FOREVER
)
FAILS_ALWAYS = FAILS_ONCE.replace("if start == 1:\n    sys", "if True:\n    sys")
COUNTS = _COUNTED + _FOREVER
SUCCEEDS_THE_SECOND_TIME = (
    _COUNTED
    + "import glob\n"
    + "trainers = glob.glob(os.path.join(os.path.dirname(sys.argv[1]), 'trainer-*.pid'))\n"
    + "while start == 2 and any(len(open(each).readlines()) < 2 for each in trainers):\n    pass\n"
    + "if start == 2:\n    sys.exit(0)\n"
    + _FOREVER
)
# A coordinator that ends well once rollout-0 has had its second start, and trainer-0 its first.
SUCCEEDS_WHEN_THE_REPLICA_IS_BACK = (
    _COUNTED
    + "replica = os.path.join(os.path.dirname(sys.argv[1]), 'rollout-0.pid')\n"
    + "while not os.path.exists(replica) or len(open(replica).readlines()) < 2:\n    pass\n"
    + "trainer = os.path.join(os.path.dirname(sys.argv[1]), 'trainer-0.pid')\n"
    + "while not (os.path.exists(trainer) and os.path.getsize(trainer)):\n    pass\n"
)
# A coordinator that is killed at its first start, once the others have had theirs, and ends well at its second.
KILLED_ONCE = (
    _COUNTED
    + "others = [os.path.join(os.path.dirname(sys.argv[1]), f'{name}.pid') for name in ('trainer-0', 'rollout-0')]\n"
    + "while not all(os.path.exists(other) for other in others):\n    pass\n"
    + "if start == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
)
SAYS_THAT_THE_RUN_FAILED = _COUNTED + "print('ValueError: loss is nan', file=sys.stderr)\nsys.exit(1)\n"
# A coordinator that ends well once rollout-0 is gone.
SUCCEEDS_WITHOUT_THE_REPLICA = (
    _COUNTED
    + "replica = os.path.join(os.path.dirname(sys.argv[1]), 'rollout-0.pid')\n"
    + "while not (os.path.exists(replica) and os.path.getsize(replica)):\n    pass\n"
    + "pid = int(open(replica).read())\n"
    + "while os.path.exists(f'/proc/{pid}'):\n    pass\n"
    + "import select\nselect.select([], [], [], 0.5)\n"
)
# A coordinator that leaves a checkpoint when it is asked to end.
SAVES_WHEN_STOPPED = (
    _IDLE
    + "import site\nsite.main()\nfrom pathlib import Path\n"
    + "from tandem_files.checkpoints import mark_complete, step_folder\n"
    + "def save(*_):\n"
    + "    folder = step_folder(Path(sys.argv[1]).parent, 7)\n"
    + "    folder.mkdir(parents=True)\n    mark_complete(folder)\n    sys.exit(0)\n"
    + "signal.signal(signal.SIGTERM, save)\nopen(sys.argv[1], 'w').write(str(os.getpid()))"
    + _FOREVER
)
# A grandchild in a session of its own that ignores SIGTERM: the hardest one to find and to end.
HAS_GRANDCHILD = (
    _IDLE
    + "subprocess.Popen([sys.executable, '-c', "
    + repr(IGNORES_SIGTERM)
    + ", sys.argv[1]], start_new_session=True)"
    + _FOREVER
)
LEAVES_GRANDCHILD = HAS_GRANDCHILD.replace(
    _FOREVER, "\nwhile not (os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1])):\n    pass\n"
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
