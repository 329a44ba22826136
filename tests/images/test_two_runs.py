"""Two runs of `tandem deploy new` beside each other in a namespace, to their ends: the kubelet stand-in, real engines.

They share the claim and nothing else. Each coordinator finds its pods by a stand-in of the API server, over TLS with
the token of its service account, and gives its sets back when its run is over.
"""

import ipaddress
import json
import os
import ssl
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tandem_files.metrics_file import MetricsFile
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.fake_kubelet import FakeKubelet
from tests.house.repository import REPO
from tests.images.engine import Engine
from tests.images.project import LOOK_S
from tests.images.test_run import never_waiting
from tests.kit.certificates import Authority, write_files
from tests.kit.waiting import until
from tests.manifests.kustomize import Manifest, build, containers, kinds, pod_templates

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(1800)]
READY_S, RUN_S = 900.0, 900.0
NAMESPACE = "team"
# Run -> iterations: one is over long before the other, also on a fast machine (5 took 4 s). The longer one never waits.
RUNS = {"red": 2, "blue": 40}
ASYNC = "blue"
PODS = ["redis-0", "trainer-0", "rollout-0", "rollout-1", "coordinator"]


class Team(NamedTuple):
    """A namespace with the objects of the runs, and its pods."""

    api: FakeCluster
    kubelet: FakeKubelet


def written(folder: Path, run: str) -> tuple[Manifest, ...]:
    """The objects of a run, as its user makes them."""
    text = (REPO / "deploy" / "overlays" / "dev-cpu" / "run.yaml").read_text(encoding="utf-8")
    assert text.count("iterations: 40") == 1
    config = folder / f"{run}.yaml"
    config.write_text(text.replace("iterations: 40", f"iterations: {RUNS[run]}"), encoding="utf-8")
    if run == ASYNC:
        never_waiting(config)
    answers = ["-n", NAMESPACE, "--overlay", "dev-cpu", "--offline", "--out", str(folder / run)]
    done = CliRunner().invoke(app, ["deploy", "new", run, "-c", str(config), *answers])
    assert done.exit_code == 0, done.output
    return build(folder / run)


@pytest.fixture
def team(docker: Engine, images: dict[str, str], redis_image: str, tmp_path: Path) -> Iterator[Team]:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: the pods were not run; only root can hand folders to their users")
    manifests = [each for run in RUNS for each in written(tmp_path, run)]
    wanted = {each["image"] for template in pod_templates(manifests).values() for each in containers(template)}
    assert wanted == {*images.values(), redis_image}
    number = uuid.uuid4().int % 200
    kubelet = FakeKubelet(docker, manifests, tmp_path, f"tandem-runs-{number}", f"10.88.{number}")
    try:
        authority = Authority("cluster")
        pair = authority.issue(["kubernetes.default.svc"], addresses=[ipaddress.IPv4Address(kubelet.gateway)])
        files = write_files(tmp_path / "api", pair, authority.pem)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(files.certificate, files.key)
        with FakeCluster(NAMESPACE, address=kubelet.gateway, tls=tls) as api:
            for each in kinds(manifests, "StatefulSet"):
                api.apply(each)
            for each in kinds(manifests, "Role"):
                (binding,) = [
                    other
                    for other in kinds(manifests, "RoleBinding")
                    if other["roleRef"]["name"] == each["metadata"]["name"]
                ]
                api.bind(each["rules"], binding["subjects"][0]["name"])
            kubelet.join(api, authority.pem.decode())
            yield Team(api, kubelet)
    finally:
        kubelet.close()


def replicas(team: Team, run: str) -> dict[str, int]:
    """The sizes of a run's sets, as the API server has them."""
    sets = {name: team.api.get("StatefulSet", f"{run}-{name}", NAMESPACE) for name in ("trainer", "rollout")}
    return {name: each["spec"]["replicas"] for name, each in sets.items()}


def is_over(team: Team, run: str) -> bool:
    """Whether a coordinator has ended, having told the API server how all pods are."""
    return team.kubelet.report() and not team.kubelet.is_running(f"{run}-coordinator")


def test_two_runs_in_a_namespace_end_by_themselves(team: Team) -> None:
    kubelet = team.kubelet
    assert set(kubelet.pods) == {f"{run}-{pod}" for run in RUNS for pod in PODS}
    # Both at once, as the controllers make them.
    for pod in PODS:
        for run in RUNS:
            kubelet.start(f"{run}-{pod}")
    for name in kubelet.pods:
        until(partial(kubelet.succeeds, name, "startupProbe"), READY_S, interval_s=LOOK_S)

    until(partial(is_over, team, "red"), RUN_S, interval_s=LOOK_S)
    assert kubelet.exit_code("red-coordinator") == 0, kubelet.logs("red-coordinator")
    # It has given back what was its own; the other's are what they were.
    assert replicas(team, "red") == {"trainer": 0, "rollout": 0}, kubelet.logs("red-coordinator")
    assert replicas(team, "blue") == {"trainer": 1, "rollout": 2}
    assert kubelet.is_running("blue-coordinator"), "the longer run was over first: the test shows too little"
    for pod in ("rollout-1", "rollout-0", "trainer-0", "redis-0"):
        kubelet.terminate(f"red-{pod}")
    until(partial(is_over, team, "blue"), RUN_S, interval_s=LOOK_S)
    assert kubelet.exit_code("blue-coordinator") == 0, kubelet.logs("blue-coordinator")
    assert replicas(team, "blue") == {"trainer": 0, "rollout": 0}

    for run, iterations in RUNS.items():
        results = kubelet.claim("run") / run
        assert json.loads((results / "summary.json").read_text())["iterations"] == iterations
        assert json.loads((results / "hf" / "config.json").read_text())["model_type"] == "qwen3"
        # From the beginning, though the claim has a run of the same name with the same settings but one.
        rows = MetricsFile(results / "metrics.jsonl").rows()
        assert [row["iteration"] for row in rows] == list(range(1, iterations + 1))
        assert any(row["token_age_mean"] for row in rows) == (run == ASYNC)
        told = kubelet.logs(f"{run}-coordinator", whole=True)
        (other,) = set(RUNS) - {run}
        assert f"{run}-rollout-0" in told
        assert not [pod for pod in PODS if f"{other}-{pod}" in told]
    # Of permissions that are missing, pods that are stuck, ...
    assert not [each for each in team.api.list_of("Event") if each.get("type") == "Warning"]
