"""What Prometheus gets from a real coordinator process: its last state before it ends, and exemplars of its traces."""

import subprocess
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.tracing import ENDPOINT
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import saved_state, with_settings, write_config
from tests.contract.test_coordinator_process import Start, fleet_arguments
from tests.contract.test_coordinator_process import start as start
from tests.kit.waiting import until

WAIT_S = 60.0
# As Prometheus asks.
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"
FINISHED = 'tandem_run_state{state="finished"} 1.0'
# Longer than the coordinator serves after its end: without a scrape it would be gone.
BETWEEN_SCRAPES_S = 2.5


def scrape(record: ServiceRecord) -> str:
    request = urllib.request.Request(f"http://{record.metrics_address}/metrics", headers={"Accept": OPENMETRICS})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return str(answer.read().decode())


def started(
    config: RunConfig, environment: ServiceEnvironment, start: Start, folder: Path
) -> tuple["subprocess.Popen[str]", ServiceRecord]:
    """A coordinator that trains until it is stopped, and where it is announced."""
    config = with_settings(config, run={"iterations": 1_000_000, "checkpoint_every": 1000, "startup_timeout_s": 60})
    start(*fleet_arguments(environment))
    process = start("coordinator", "--config", write_config(config, folder))
    registry = Registry(environment.redis_url, environment.run_id)
    (record,) = registry.wait_for("coordinator", ["coordinator"], WAIT_S)
    registry.close()
    until(lambda: (environment.run_dir / "metrics.jsonl").exists(), WAIT_S)
    return process, record


def serves(record: ServiceRecord) -> bool:
    with grpc.insecure_channel(record.address) as channel:
        try:
            CoordinatorServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def test_the_end_of_a_run_is_scraped_before_its_coordinator_ends(
    config: RunConfig, environment: ServiceEnvironment, start: Start, tmp_path: Path
) -> None:
    process, record = started(config, environment, start, tmp_path)
    first_s = time.monotonic()
    assert FINISHED not in scrape(record)
    until(lambda: time.monotonic() - first_s > BETWEEN_SCRAPES_S, WAIT_S)
    assert FINISHED not in scrape(record)
    with grpc.insecure_channel(record.address) as channel:
        CoordinatorServiceStub(channel).StopAfterStep(pb.StopAfterStepRequest(), timeout=10)
    until(lambda: saved_state(environment)["status"] == "finished", WAIT_S)
    until(lambda: not serves(record), WAIT_S)
    assert FINISHED in scrape(record)
    assert process.wait(WAIT_S) == 0


def test_durations_carry_the_trace_of_their_iteration_while_traces_are_on(
    config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")  # an unreachable collector
    _, record = started(config, environment, start, tmp_path)

    def with_trace() -> list[str]:
        return [line for line in scrape(record).splitlines() if '# {trace_id="' in line]

    both = {"tandem_weight_sync_seconds_bucket", "tandem_iteration_seconds_bucket"}
    until(lambda: {line.partition("{")[0] for line in with_trace()} == both, WAIT_S)
    trace_id = with_trace()[0].partition('trace_id="')[2].partition('"')[0]
    assert len(trace_id) == 32
    assert int(trace_id, 16) > 0
