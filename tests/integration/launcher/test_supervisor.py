"""Processes under guards: nothing survives, whatever it does and however it was asked to end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.run.supervisor import ProcessSpec, Supervisor
from tests.integration.launcher.processes import (
    FAILS,
    HAS_GRANDCHILD,
    IGNORES_SIGTERM,
    LEAVES_GRANDCHILD,
    WAITS,
    alive,
    read_pid,
    spec,
)
from tests.kit.waiting import until

pytestmark = pytest.mark.integration


async def _pid(tmp_path: Path, name: str) -> int:
    return await asyncio.to_thread(read_pid, tmp_path, name)


def heeds_sigterm(status: Path) -> bool:
    """Whether a process has a handler for it, by its /proc/PID/status."""
    (caught,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


async def test_the_cause_is_of_the_process_that_has_just_ended(tmp_path: Path) -> None:
    """A log holds what earlier processes of the name have said, and what one said that a signal then ended."""
    log = tmp_path / "logs" / "coordinator.log"
    log.parent.mkdir()
    log.write_text('{"level": "error", "message": "run failed", "error": "of the one before"}\n')
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "coordinator", WAITS))
    pid = read_pid(tmp_path, "coordinator")
    os.kill(pid, signal.SIGKILL)
    assert (await supervisor.wait("coordinator")).describe() == "coordinator was ended by SIGKILL"
    chatty = "import os, signal\nprint('weights committed', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    await supervisor.replace([spec(tmp_path, "coordinator", chatty)])
    assert (await supervisor.wait("coordinator")).describe() == "coordinator was ended by SIGKILL"
    await supervisor.replace([spec(tmp_path, "coordinator", FAILS)])
    described = (await supervisor.wait("coordinator")).describe()
    assert described == "coordinator exited with code 3: ValueError: out of cheese"


async def test_the_processes_of_a_service_are_its_own_and_those_it_started(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "family", HAS_GRANDCHILD, grace_s=0.3))
    grandchild = await _pid(tmp_path, "family")
    service, last = supervisor.pids("family")
    assert last == grandchild
    assert alive(service)
    await supervisor.stop()
    assert supervisor.pids("family") == []


async def test_a_failing_process_is_named_with_code_and_last_error(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "idle", WAITS))
    await supervisor.start(spec(tmp_path, "cheese-shop", FAILS))
    ended = await asyncio.wait_for(supervisor.wait_any(), 20)
    await supervisor.stop()
    assert (ended.name, ended.code) == ("cheese-shop", 3)
    assert ended.describe() == "cheese-shop exited with code 3: ValueError: out of cheese"


async def test_stop_ends_everything_and_returns_when_it_is_gone(tmp_path: Path) -> None:
    supervisor = Supervisor()
    for name in ("one", "two"):
        await supervisor.start(spec(tmp_path, name, WAITS))
    pids = [await _pid(tmp_path, name) for name in ("one", "two")]
    await supervisor.stop()
    assert not any(alive(pid) for pid in pids)
    assert {ended.code for ended in supervisor.ended()} == {128 + signal.SIGTERM}


async def test_a_process_starts_after_its_delay(tmp_path: Path) -> None:
    supervisor = Supervisor()
    started = time.monotonic()
    await supervisor.start(replace(spec(tmp_path, "late", WAITS), delay_s=0.5))
    assert alive(await _pid(tmp_path, "late"))
    assert time.monotonic() - started >= 0.5
    await supervisor.stop()


async def test_a_process_that_was_to_start_later_does_not(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(replace(spec(tmp_path, "late", WAITS, grace_s=0.5), delay_s=3600.0))
    guard = Path(f"/proc/{supervisor._children['late'].pid}/status")
    await asyncio.to_thread(until, lambda: heeds_sigterm(guard), 20.0, "a guard that listens")
    assert await supervisor.stop() == []  # nobody had to be killed
    assert not (tmp_path / "late.pid").exists()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "stubborn", IGNORES_SIGTERM, grace_s=0.3))
    pid = await _pid(tmp_path, "stubborn")
    started = time.monotonic()
    await supervisor.stop()
    assert 0.25 < time.monotonic() - started < 5.0
    assert not alive(pid)
    assert supervisor.ended()[0].describe() == "stubborn was ended by SIGKILL"


async def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "stubborn", IGNORES_SIGTERM, grace_s=60.0))
    pid = await _pid(tmp_path, "stubborn")
    stopping = asyncio.create_task(supervisor.stop())
    supervisor.kill()
    await asyncio.wait_for(stopping, 10)
    assert not alive(pid)


@pytest.mark.parametrize("script", [HAS_GRANDCHILD, LEAVES_GRANDCHILD], ids=["parent stays", "parent leaves it behind"])
async def test_grandchildren_in_other_sessions_end_too(tmp_path: Path, script: str) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "family", script, grace_s=0.3))
    grandchild = await _pid(tmp_path, "family")
    await supervisor.stop()
    assert not alive(grandchild)


async def test_stages_stop_from_high_to_low(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "open(sys.argv[1], 'w').write('1')\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "open(sys.argv[1] + '.end', 'w').write(repr(time.monotonic()))\n"
    )
    supervisor = Supervisor()
    for stage, name in ((0, "redis"), (1, "service"), (2, "coordinator")):
        await supervisor.start(spec(tmp_path, name, script, stage=stage))
        await _pid(tmp_path, name)
    await supervisor.stop()
    ends = {name: float((tmp_path / f"{name}.pid.end").read_text()) for name in ("redis", "service", "coordinator")}
    assert sorted(ends, key=lambda name: ends[name]) == ["coordinator", "service", "redis"]


async def test_a_missing_program_is_reported_in_the_log(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(ProcessSpec(name="ghost", command=["no-such-program"], log=tmp_path / "ghost.log"))
    ended = await asyncio.wait_for(supervisor.wait("ghost"), 20)
    assert ended.describe() == "ghost exited with code 127: cannot start no-such-program: No such file or directory"


async def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(spec(tmp_path, "one", WAITS))
    with pytest.raises(ValueError, match="process name 'one' is taken"):
        await supervisor.start(spec(tmp_path, "one", WAITS))
    await supervisor.stop()


async def test_a_cancelled_start_leaves_nothing_behind(tmp_path: Path) -> None:
    supervisor = Supervisor()
    starting = asyncio.create_task(supervisor.start(spec(tmp_path, "late", WAITS)))
    await asyncio.sleep(0)
    starting.cancel()
    await supervisor.stop()
    assert [ended.name for ended in supervisor.ended()] == ["late"]


async def test_the_folder_of_a_process_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "socket"
    folder.mkdir()
    supervisor = Supervisor()
    await supervisor.start(
        ProcessSpec(name="server", command=[sys.executable, "-c", "pass"], log=tmp_path / "log", remove=folder)
    )
    await supervisor.wait("server")
    assert not folder.exists()


async def test_a_stop_before_the_guard_listens_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "socket"
    folder.mkdir()
    supervisor = Supervisor()
    early = spec(tmp_path, "server", WAITS)
    await supervisor.start(replace(early, remove=folder))
    await supervisor.stop()
    assert not folder.exists()


_LAUNCHER = """
import asyncio, sys
from pathlib import Path
from launcher.run.supervisor import Supervisor
from tests.integration.launcher.processes import HAS_GRANDCHILD, IGNORES_SIGTERM, spec

async def main():
    supervisor = Supervisor()
    folder = Path(sys.argv[1])
    await supervisor.start(spec(folder, "family", HAS_GRANDCHILD, grace_s=0.3))
    await supervisor.start(spec(folder, "stubborn", IGNORES_SIGTERM, grace_s=0.3))
    await supervisor.wait_any()

asyncio.run(main())
"""


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    try:
        pids = [read_pid(tmp_path, name) for name in ("family", "stubborn")]
        assert all(alive(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait(10)
    until(lambda: not any(alive(pid) for pid in pids), 20.0, "children of the killed launcher gone")


def test_a_killed_guard_takes_its_service_along(tmp_path: Path) -> None:
    async def main() -> int:
        supervisor = Supervisor()
        await supervisor.start(spec(tmp_path, "one", WAITS))
        pid = await _pid(tmp_path, "one")
        os.kill(supervisor._children["one"].pid, signal.SIGKILL)
        await supervisor.stop()
        return pid

    pid = asyncio.run(main())
    until(lambda: not alive(pid), 20.0, "service of the killed guard gone")
