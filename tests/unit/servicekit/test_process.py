"""What surrounds a service: environment, logs, metrics, versions, the end of the process."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import urllib.request
from importlib import metadata

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, Internal, PeerLost
from servicekit.lifecycle import termination as lifecycle
from servicekit.lifecycle.garbage import collect_from_now_on
from servicekit.lifecycle.tasks import cancel
from servicekit.metrics import serve_metrics
from servicekit.versions import software_versions

GOOD = {"REDIS_URL": "redis://:secret@127.0.0.1:6379", "TANDEM_RUN_ID": "demo-1", "TANDEM_RUN_DIR": "/tmp"}


def test_the_environment_has_defaults_for_what_is_local() -> None:
    environment = ServiceEnvironment.from_env({**GOOD, "TANDEM_GRPC_PORT": "5005", "HOME": "/root"})
    assert (environment.run_id, environment.bind, environment.metrics_port) == ("demo-1", "127.0.0.1:5005", 0)


def test_every_wrong_variable_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceEnvironment.from_env(
            {"TANDEM_RUN_ID": "a b", "TANDEM_METRICS_PORT": "70000", "TANDEM_RUN_DIR": "/dev/null"}
        )
    problems = str(caught.value).split("; environment")
    assert len(problems) == 4
    assert "REDIS_URL is not set" in str(caught.value)
    for name in ("TANDEM_RUN_ID='a b'", "TANDEM_METRICS_PORT='70000'", "TANDEM_RUN_DIR='/dev/null'"):
        assert f"{name} is wrong" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("REDIS_URL", "http://:secret@h"), ("REDIS_URL", ""), ("TANDEM_GRPC_PORT", "http"), ("TANDEM_GRPC_PORT", "-1")],
)
def test_a_malformed_variable_is_named_without_its_secret(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {name}") as caught:
        ServiceEnvironment.from_env({**GOOD, name: value})
    assert "secret" not in str(caught.value)


def test_versions_are_those_installed() -> None:
    versions = software_versions(["pydantic_core", "no-such-package"])
    assert set(versions) == {"python", "pydantic_core"}
    assert versions["pydantic_core"][0].isdigit()


def test_versions_are_read_once_since_each_status_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    software_versions(["numpy"])
    monkeypatch.setattr(metadata, "version", None)
    assert software_versions(["numpy"])["numpy"]


@pytest.mark.parametrize("off", [True, False], ids=["a service", "where it was never off"])
def test_only_what_a_start_has_made_is_never_collected(off: bool) -> None:
    frozen = gc.get_freeze_count()
    if off:
        gc.disable()
    try:
        collect_from_now_on()
        assert gc.isenabled()
        assert (gc.get_freeze_count() > frozen) == off
    finally:
        gc.enable()


def test_metrics_are_served_on_a_port_that_is_told() -> None:
    port = serve_metrics("127.0.0.1")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        assert b"tandem_rpc_seconds" in reply.read()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        serve_metrics("127.0.0.1", port)


PROGRAM = """
import asyncio, logging, sys
from servicekit import logs
from servicekit.errors import ConfigError, PeerLost
from servicekit.lifecycle import termination as lifecycle

async def main(stop):
    logs.get_logger("ours").debug("not shown")
    if sys.argv[1] == "early":
        raise ConfigError("TANDEM_RUN_ID is not set")
    logs.configure_logging("trainer", run="demo", rank=None)
    logs.get_logger("ours").info("state changed", state="ready")
    logging.getLogger("library").warning("said %d", 3)
    mode = sys.argv[1]
    if mode == "config":
        raise ConfigError("grpo.group_size is 1")
    if mode == "fail":
        raise PeerLost("rank 3 is gone")
    if mode == "bug":
        raise KeyError("rank")
    print("up", flush=True)
    await lifecycle.run_until_stopped(stop, {})

sys.exit(lifecycle.run_main("early-name", main))
"""


def run_program(mode: str, *, send: int | None = None) -> tuple[int, list[dict[str, object]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if send is not None and process.stdout is not None:
            assert process.stdout.readline() == "up\n"
            process.send_signal(send)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, [json.loads(line) for line in errors.splitlines()]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_a_service_with_success(sent: signal.Signals) -> None:
    code, lines = run_program("run", send=sent)
    assert code == 0
    assert (lines[-1]["message"], lines[-1]["signal"]) == ("stop requested", sent.name)


@pytest.mark.parametrize(
    ("mode", "expected", "error"),
    [
        ("early", 2, "TANDEM_RUN_ID is not set"),
        ("config", 2, "grpo.group_size is 1"),
        ("fail", 1, "rank 3 is gone"),
        ("bug", 1, "KeyError: 'rank'"),
    ],
)
def test_a_failure_is_told_by_code_and_last_line(mode: str, expected: int, error: str) -> None:
    code, lines = run_program(mode)
    assert code == expected
    assert lines[-1]["error"] == error
    assert ("exception" in lines[-1]) == (mode == "bug")  # a traceback is for bugs


def test_log_lines_of_ours_and_of_libraries_are_json_with_the_same_fields() -> None:
    _, lines = run_program("config")
    ours, library = lines[0], lines[1]
    assert {key: ours[key] for key in ("message", "state", "level", "logger")} == {
        "message": "state changed",
        "state": "ready",
        "level": "info",
        "logger": "ours",
    }
    assert (library["message"], library["level"], library["logger"]) == ("said 3", "warning", "library")
    for line in lines:
        assert (line["service"], line["run"]) == ("trainer", "demo")
        assert str(line["time"]).endswith("Z")
        assert "rank" not in line


async def test_a_task_that_dies_ends_the_wait_with_its_error() -> None:
    async def die() -> None:
        raise PeerLost("gone")

    with pytest.raises(PeerLost, match="gone"):
        await lifecycle.run_until_stopped(asyncio.Event(), {"pump": die(), "other": asyncio.Event().wait()})
    assert len(asyncio.all_tasks()) == 1


async def test_a_task_that_returns_unasked_is_a_failure() -> None:
    async def leave() -> None:
        return

    with pytest.raises(Internal, match="task pump ended"):
        await lifecycle.run_until_stopped(asyncio.Event(), {"pump": leave()})


async def test_watch_tells_failures_only() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def succeed() -> None:
        return

    told: list[BaseException] = []
    tasks = [asyncio.create_task(each) for each in (fail(), succeed(), asyncio.Event().wait())]
    for task in tasks:
        lifecycle.watch(task, told.append)
    await cancel(tasks[2])
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert [type(error) for error in told] == [KeyError]


async def test_signals_set_the_event_also_when_they_come_twice() -> None:
    stop = lifecycle.install_stop_signals(asyncio.get_running_loop())
    try:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), each)
        async with asyncio.timeout(10):
            await stop.wait()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(each)
