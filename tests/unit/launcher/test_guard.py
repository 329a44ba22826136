"""How long a service has to end: as long as it works on that, where others have the processors; not if it is stuck."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.run import guard
from launcher.run.guard import MOST_MORE_S, Grace
from tests.kit.waiting import until

GRACE_S = 0.4
# Ends a second of processor time after SIGTERM; then it would wait for ever.
ENDS_SLOWLY = """
import pathlib, signal, sys, time
def end(*_):
    while time.process_time() < 1.0:
        pass
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""
IS_STUCK = ENDS_SLOWLY.replace("    while", "    return\n    while")


@pytest.mark.parametrize(
    ("used_s", "periods"),
    [
        ([0.0], 0),  # it waits for something
        ([0.1], 0),  # its threads look now and then
        ([0.3, 0.3], 1),  # it works, and is stuck then
        ([0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7], 6),  # it has all of MOST_MORE_S
        ([-1.0, -1.0], 1),  # a process has ended
    ],
)
def test_a_service_has_further_periods_while_it_works(used_s: list[float], periods: int) -> None:
    grace, now_s, given = Grace(10.0, 100.0, 5.0), 100.0, 0
    for used in used_s:
        now_s += 10.0
        more_s = grace.more_s(now_s, 5.0 + used)
        if not more_s:
            break
        given += 1
    assert given == periods
    assert now_s <= 100.0 + 10.0 + MOST_MORE_S


@pytest.mark.parametrize(("script", "code"), [(ENDS_SLOWLY, 7), (IS_STUCK, 128 + signal.SIGKILL)])
def test_what_still_ends_is_not_killed_and_what_is_stuck_is(tmp_path: Path, script: str, code: int) -> None:
    up = tmp_path / "up"
    options = ["--parent", str(os.getpid()), "--grace-s", str(GRACE_S)]
    service = [sys.executable, "-S", "-c", script, str(up)]
    process = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, *options, "--", *service])
    until(up.exists, 20.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == code
