"""What autoscalers ask a real Prometheus, as the component's page says it, is what an async run implies, and settles.

The run is simulated: the real schedule, dispatch and rule in virtual time. Autoscalers are their documented formula.
"""

import http.server
import math
import re
import threading
from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from coordinator.record.replicas_wanted import IterationWork, ReplicasWanted
from coordinator.record.sinks import FinishedIteration
from tests.kit.waiting import until
from tests.manifests.kustomize import DEPLOY
from tests.monitoring.live import Prometheus, prometheus
from tests.unit.coordinator.simulated_works import works

pytestmark = [pytest.mark.integration]
README = (DEPLOY / "components" / "autoscale-rollout" / "README.md").read_text(encoding="utf-8")
SCALER = yaml.safe_load((DEPLOY / "components" / "autoscale-rollout" / "autoscaler.yaml").read_text(encoding="utf-8"))
# As PodMonitor and relabelling make them, of a run `my-run`.
LABELS = {"namespace": "tandem", "tandem_run_id": "my-run", "run_job": "my-run-coordinator"}
NAME, SLOTS, SCRAPED_S = "tandem_replicas_wanted", 4, 30.0
WORLD: dict[str, Any] = {"prompts": 16, "train_s": 6.0}


def blocks() -> list[Any]:
    """The YAML of the page."""
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)]


def of_keda() -> str:
    (scaled,) = [each for each in blocks() if each.get("kind") == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    return str(trigger["metadata"]["query"])


def of_the_adapter() -> str:
    """The rule's template, filled in as prometheus-adapter does for the object that our autoscaler describes."""
    ((rule,),) = [each["rules"] for each in blocks() if "rules" in each]
    (metric,) = SCALER["spec"]["metrics"]
    assert rule["seriesQuery"].startswith(f"{metric['object']['metric']['name']}{{")
    assert metric["object"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    kinds = {resource["resource"]: label for label, resource in rule["resources"]["overrides"].items()}
    label = kinds[metric["object"]["describedObject"]["kind"].lower()]
    matchers = f'{kinds["namespace"]}="tandem",{label}="my-run-{metric["object"]["describedObject"]["name"]}"'
    parts = {"<<.Series>>": NAME, "<<.LabelMatchers>>": matchers, "<<.GroupBy>>": label}
    text = str(rule["metricsQuery"])
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def desired(replicas: int, value: float) -> int:
    """A HorizontalPodAutoscaler's formula for an average of 1: within a tenth nothing changes."""
    return replicas if abs(value / replicas - 1.0) <= 0.1 else math.ceil(value)


class FakeCoordinator(http.server.BaseHTTPRequestHandler):
    """Exports what the process has measured, with the labels of a cluster; another run's, which nobody asks for."""

    def do_GET(self) -> None:
        of_run = ",".join(f'{name}="{text}"' for name, text in LABELS.items())
        lines = [f"# TYPE {NAME} gauge", f"{NAME}{{{of_run.replace('my-run', 'other')}}} 99"]
        if (value := REGISTRY.get_sample_value(NAME)) is not None:
            lines.append(f"{NAME}{{{of_run}}} {value}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(("\n".join(lines) + "\n").encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Prometheus]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeCoordinator) as exporter:
        threading.Thread(target=exporter.serve_forever, daemon=True).start()
        with prometheus(tmp_path, {"coordinator": {"": f"127.0.0.1:{exporter.server_port}"}}) as started:
            yield started
        exporter.shutdown()


class Run:
    """A run whose number of replicas an autoscaler sets."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rule = ReplicasWanted(slots=SLOTS, least=1, expected=lambda: self.size)

    def iterate(self) -> float:
        """Some iterations with as many replicas as there are. Returns: what is exported then."""
        for work in works("async", self.size, **WORLD):
            self.rule.take(finished(work, self.size))
        value = REGISTRY.get_sample_value(NAME)
        assert value is not None
        return value


def gives(server: Prometheus, query: str, value: float) -> bool:
    return server.now(query) == [value]


def finished(work: IterationWork, size: int) -> FinishedIteration:
    generation = SimpleNamespace(slots=size * SLOTS, running_s=work.running_s, most_running=work.most_running)
    record: Any = SimpleNamespace(generation=generation)
    return FinishedIteration(record=record, row={"trainer_compute_s": work.compute_s})


@pytest.mark.timeout(600)
def test_both_autoscalers_get_the_number_that_the_run_implies_and_it_settles(server: Prometheus) -> None:
    run, sizes = Run(1), [1]
    for _ in range(6):
        value = run.iterate()
        for query in (of_keda(), of_the_adapter()):
            until(partial(gives, server, query, value), SCRAPED_S, f"{value} of {query}")
        run.size = desired(run.size, value)
        sizes.append(run.size)
    assert sizes[-3:] == [sizes[-1]] * 3, sizes
    # 24 s of engine time for a train step of 6 s, and a tenth more.
    assert 4 <= sizes[-1] <= 6
    assert sizes == sorted(sizes)
    seen = [value for value, _ in groupby(server.values(of_keda()))]
    assert all(before < after for before, after in pairwise(seen)), seen
