"""Under which conditions something was measured: when, which commit, which processor."""

import datetime
import platform
import subprocess
from pathlib import Path


def now() -> str:
    """Return the time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Return the commit, with "-dirty" if the code differs from it; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
