"""`tandem run` with the real engines: over certificates, and closed to others on the same machine without them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from servicekit.errors import REASON_KEY
from servicekit.security.certificates import role_name
from tandem_api.coordinator.v1 import coordinator_pb2
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2
from tests.e2e.conftest import Tandem, rows_of, run_arguments
from tests.kit.certificates import Authority, variables, write_files

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(280)]


def test_a_run_over_tls_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    names = [role_name(role) for role in ("coordinator", "trainer", "rollout", "operator")]
    for name, value in variables(write_files(tmp_path / "tls", authority.issue(names), authority.pem)).items():
        monkeypatch.setenv(name, value)
    run = Tandem(run_arguments(), tmp_path)
    try:
        assert run.wait_end(240) == 0, run.output()
        assert [row["iteration"] for row in rows_of(tmp_path / "runs" / "small")] == [1, 2]
        for service in ("trainer-0", "rollout-0", "coordinator"):
            log = (tmp_path / "runs" / "small" / "logs" / f"{service}.log").read_text()
            assert '"tls": true' in log, log[-2000:]
            assert '"tls": false' not in log
    finally:
        if run.process.poll() is None:
            run.process.kill()
        run.assert_nothing_left()


SERVICES: dict[str, Any] = {
    "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    "trainer-0": trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
    "rollout-0": rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
}
ROUNDS = weights_pb2.DESCRIPTOR.services_by_name["RoundService"]
LOOPBACK = ("127.0.0.1", "::ffff:127.0.0.1", "::1")


def test_another_user_of_the_machine_can_command_nothing(tmp_path: Path) -> None:
    run = Tandem(run_arguments(run__iterations=1000), tmp_path)
    folder = tmp_path / "runs" / "small"
    try:
        run.wait_iteration(2)
        assert listening(run) - set(LOOPBACK) == set()
        for name, service in SERVICES.items():
            with grpc.insecure_channel(address_of(folder / "logs" / f"{name}.log")) as channel:
                for method in [*service.methods, *([] if name == "coordinator" else ROUNDS.methods)]:
                    path = f"/{method.containing_service.full_name}/{method.name}"
                    assert refused(channel, path, method) == "UNAUTHENTICATED"
        assert (folder / ".token").stat().st_mode & 0o777 == 0o600
        assert "running" in tandem(tmp_path, "status")
        assert "small" in tandem(tmp_path, "top", "--once")
    finally:
        run.process.terminate()
        run.wait_end()
        run.assert_nothing_left()


def tandem(folder: Path, *arguments: str) -> str:
    """Output of a `tandem` command of the run's own user."""
    command = [sys.executable, "-m", "launcher", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True).stdout


def address_of(log: Path) -> str:
    """Where a service says that it serves."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return next(str(line["address"]) for line in lines if line.get("message") == "serving")


def refused(channel: grpc.Channel, path: str, method: Any) -> str:
    """Reason that a call without a token gets."""
    requests = iter([b""]) if method.client_streaming else b""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    call = kinds[method.client_streaming, method.server_streaming](path)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(requests, timeout=10) if method.server_streaming else [call(requests, timeout=10)])
    return str(dict(caught.value.trailing_metadata())[REASON_KEY])


def listening(run: Tandem) -> set[str]:
    """Addresses that the run's processes listen on."""
    connections = [each for process in run.processes() for each in process.net_connections("tcp")]
    found = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert found
    return found
