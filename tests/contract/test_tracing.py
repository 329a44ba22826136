"""Spans of a real coordinator process and real gRPC services, as an OTLP collector gets them; nothing while off."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.tracing import ENDPOINT, outgoing, served, span, start_tracing
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import with_settings, write_config
from tests.contract.test_coordinator_process import Start, end_of, fleet_arguments
from tests.contract.test_coordinator_process import start as start
from tests.house.repository import REPO

ARRIVED_S = 30.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps everything: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(about["service.name"], each) for each in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [each for _, each in self.spans if each.name == name]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(0)


def test_an_iteration_is_one_trace_over_all_services(
    collector: tuple[Collector, str],
    config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, endpoint = collector
    monkeypatch.setenv(ENDPOINT, endpoint)
    config = with_settings(config, run={"iterations": 2, "startup_timeout_s": 60})
    fleet = start(*fleet_arguments(environment))
    code, _ = end_of(start("coordinator", "--config", write_config(config, tmp_path)))
    assert code == 0
    fleet.terminate()  # it delivers its last spans before it ends
    assert fleet.wait(ARRIVED_S) == 0
    first, second = sorted(kept.named("iteration"), key=lambda each: each.start_time_unix_nano)
    assert first.trace_id != second.trace_id
    inside = [(service, each) for service, each in kept.spans if each.trace_id == first.trace_id]
    by_id = {each.span_id: each for _, each in inside}

    def ancestors(each: Any) -> list[str]:
        above = by_id.get(each.parent_span_id)
        return [] if above is None else [above.name, *ancestors(above)]

    paths = {(service, each.name, *ancestors(each)) for service, each in inside}
    rollout, trainer = "tandem_api.rollout.v1.RolloutService", "tandem_api.trainer.v1.TrainerService"
    rounds = "tandem_api.weights.v1.RoundService"
    assert paths >= {
        ("tandem-coordinator", "iteration"),
        ("tandem-coordinator", "reward", "iteration"),
        ("tandem-fleet", f"{rollout}/Generate", "generate", "iteration"),
        ("tandem-fleet", f"{trainer}/TrainStep", "train", "iteration"),
        ("tandem-fleet", f"{rounds}/RunPhase", "sync transfer", "sync", "iteration"),
        ("tandem-fleet", f"{rounds}/RunPhase", "sync commit", "sync", "iteration"),
    }
    attributes = {each.key: each.value.int_value for each in first.attributes}
    assert attributes["iteration"] == 1


def test_a_collector_that_is_away_costs_spans_and_not_the_run(
    config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(*fleet_arguments(environment))
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    config = with_settings(config, run={"iterations": 2, "startup_timeout_s": 60})
    assert end_of(start("coordinator", "--config", write_config(config, tmp_path)))[0] == 0


def test_nothing_is_loaded_while_it_is_off() -> None:
    code = (
        # redis-py loads OpenTelemetry's metrics by itself.
        "import sys, coordinator.app, servicekit.tracing as t; t.start_tracing('x', {});"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_while_it_is_off_nothing_is_said() -> None:
    with span("a", b=1), served("/x/y", (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)):
        assert outgoing() == ()


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        start_tracing("x", {ENDPOINT: "collector:4317"})
