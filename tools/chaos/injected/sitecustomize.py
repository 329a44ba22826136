"""What processes of a run under test import first: their clock and their disk, as files in $TANDEM_CHAOS say.

clock   seconds that are added to the time of day
disk    seconds that each forced write takes longer
"""

import os
import pathlib
import time

_FOLDER = pathlib.Path(os.environ.get("TANDEM_CHAOS", "/nonexistent"))
_time, _time_ns, _fsync, _fdatasync, _sleep = time.time, time.time_ns, os.fsync, os.fdatasync, time.sleep


def _said(name: str) -> float:
    try:
        return float((_FOLDER / name).read_text())
    except (OSError, ValueError):
        return 0.0


def _moved_time() -> float:
    return _time() + _said("clock")


def _moved_time_ns() -> int:
    return _time_ns() + int(_said("clock") * 1e9)


def _slow_fsync(descriptor: int) -> None:
    _sleep(_said("disk"))
    _fsync(descriptor)


def _slow_fdatasync(descriptor: int) -> None:
    _sleep(_said("disk"))
    _fdatasync(descriptor)


if _FOLDER.is_dir():
    time.time, time.time_ns = _moved_time, _moved_time_ns
    os.fsync, os.fdatasync = _slow_fsync, _slow_fdatasync  # type: ignore[assignment]
