"""Programs that run together: they end together, on a signal or with the first of them, and with which exit code."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servicekit.lifecycle.processes import Child, Program, end, run_together
from tests.kit.waiting import until

# Runs shell commands, given after the seconds of grace and those that the others have alone.
TOGETHER = """
import asyncio
import sys
from servicekit.lifecycle.termination import run_main
from servicekit.lifecycle.processes import Program, run_together
programs = [Program(name=f"p{n}", command=["sh", "-c", text]) for n, text in enumerate(sys.argv[3:])]
async def main(stop):
    return await run_together(programs, stop, grace_s=float(sys.argv[1]), alone_s=float(sys.argv[2]))
sys.exit(run_main("together", main, loop_factory=asyncio.new_event_loop))
"""
# Starts programs, one after the other, beside a gRPC server that is being called.
BESIDE_GRPC = """
import asyncio
import contextlib
from servicekit.lifecycle.processes import Child, Program
import grpc
async def chat(call):
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call(b"", timeout=60)
async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = asyncio.create_task(chat(channel.unary_unary("/no/such")))
        codes = [await (await Child.start(Program(name="true", command=["true"]))).ended for _ in range(100)]
        calls.cancel()
    await server.stop(None)
    print(sorted(set(codes)))
asyncio.run(main())
"""
DEADLINE_S = 60.0
FOREVER = "while :; do sleep 0.05; done"


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """asyncio's own: SGLang makes uvloop's the policy of the process of whatever test imports it first."""
    return asyncio.DefaultEventLoopPolicy()


def start(*scripts: str, grace_s: float = DEADLINE_S, alone_s: float = 0.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TOGETHER, str(grace_s), str(alone_s), *scripts])


def test_ranks_that_finish_end_the_host_well() -> None:
    """However fast: each exit code is seen."""
    assert start(*["exit 0"] * 8).wait(DEADLINE_S) == 0


def test_the_first_failure_ends_the_others_and_is_the_exit_code(tmp_path: Path) -> None:
    up, told = tmp_path / "up", tmp_path / "told"
    fails = f"until [ -e {up} ]; do sleep 0.05; done; exit 3"
    assert start(fails, f"trap 'touch {told}; exit 4' TERM; touch {up}; {FOREVER}").wait(DEADLINE_S) == 3
    assert told.exists()


def test_a_rank_that_a_signal_ended_has_failed() -> None:
    assert start("kill -KILL $$", FOREVER).wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_sigterm_reaches_every_rank_and_is_no_failure(tmp_path: Path) -> None:
    up, told = [tmp_path / f"up{rank}" for rank in (0, 1)], [tmp_path / f"told{rank}" for rank in (0, 1)]
    scripts = [f"trap 'touch {told[rank]}; exit 0' TERM; touch {up[rank]}; {FOREVER}" for rank in (0, 1)]
    host = start(*scripts)
    until(lambda: all(path.exists() for path in up), DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 0
    assert all(path.exists() for path in told)


def test_a_rank_that_does_not_listen_yet_is_no_failure(tmp_path: Path) -> None:
    up = tmp_path / "up"
    host = start(f"touch {up}; {FOREVER}")
    until(up.exists, DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 0


def test_a_rank_that_does_not_heed_it_is_killed(tmp_path: Path) -> None:
    up = tmp_path / "up"
    host = start(f"trap '' TERM; touch {up}; {FOREVER}", grace_s=0.2)
    until(up.exists, DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_what_the_others_end_with_by_themselves_is_waited_for() -> None:
    assert start("sleep 0.2; exit 4", "exit 0", alone_s=DEADLINE_S).wait(DEADLINE_S) == 4


def test_the_others_are_ended_when_their_time_alone_is_over() -> None:
    assert start("exit 3", "exec sleep 600", alone_s=0.2).wait(DEADLINE_S) == 3


def test_a_stop_ends_the_time_alone() -> None:
    ended = "sleep 0.1; kill -TERM $PPID; exit 0"
    assert start(ended, "exec sleep 600", alone_s=600).wait(DEADLINE_S) == 0


def test_programs_die_with_the_process_that_runs_them(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    together = start(f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 600")
    until(pid_file.exists, DEADLINE_S)
    together.kill()
    together.wait(DEADLINE_S)
    pid = int(pid_file.read_text())
    until(lambda: _is_gone(pid), DEADLINE_S)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_orphans_leave_no_zombies(tmp_path: Path) -> None:
    """A container's first process is the parent of all whose parents have ended; here it is one by prctl."""
    found = tmp_path / "zombies"
    orphan = "(sleep 0.2; exit 0) & exit 0"
    look = f"sh -c '{orphan}'; sleep 1; ps -o stat= --ppid $PPID | grep -c Z > {found}; exit 0"
    subreaper = f"import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n{TOGETHER}"
    subprocess.run([sys.executable, "-c", subreaper, "5", "0", look], timeout=DEADLINE_S, check=True)
    assert found.read_text().strip() == "0"


async def test_a_program_that_cannot_be_started_ends_those_before_it() -> None:
    programs = [Program(name="one", command=["sleep", "600"]), Program(name="two", command=["/no/such/program"])]
    with pytest.raises(FileNotFoundError):
        await run_together(programs, asyncio.Event(), grace_s=DEADLINE_S)
    assert _children() == []


def _children() -> list[str]:
    """Programs below this process that still run."""
    found = subprocess.run(
        ["ps", "-o", "stat=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return [line for line in found.stdout.splitlines() if "sleep 600" in line and not line.startswith("Z")]


def test_children_start_beside_a_busy_grpc_server() -> None:
    """With gRPC's handlers for forks, 15 of 100 ended by SIGABRT or SIGSEGV before they ran their program."""
    command = [sys.executable, "-c", BESIDE_GRPC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr


async def test_a_child_is_ended_by_force_when_its_grace_is_over(tmp_path: Path) -> None:
    up = tmp_path / "up"
    stubborn = await Child.start(Program(name="stubborn", command=["sh", "-c", f"trap '' TERM; touch {up}; {FOREVER}"]))
    gentle = await Child.start(Program(name="gentle", command=["sleep", "600"]))
    await asyncio.to_thread(until, up.exists, DEADLINE_S)
    await end([stubborn, gentle], 0.3)
    assert (stubborn.ended.result(), gentle.ended.result()) == (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    stubborn.signal(signal.SIGTERM)  # nothing: it has ended
