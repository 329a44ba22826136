"""The pods of overlay dev-cpu, run by a kubelet stand-in on a real Docker engine: the demo, to its end.

Once as it is, with both trainer ranks in one pod, and once with a rank in each of two pods, which meet by pod DNS.
"""

import copy
import json
import os
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.fake_kubelet import FakeKubelet
from tests.images.engine import Engine
from tests.images.project import LOOK_S
from tests.kit.waiting import until
from tests.manifests.kustomize import Manifest, containers, environment, find, overlay, pod_template, pod_templates

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(1800)]
READY_S, RUN_S, STOP_S = 600.0, 600.0, 60.0
ITERATIONS = 3
ORDER = ["coordinator", "rollout-0", "trainer-1", "trainer-0", "redis-0", "rollout-1"]


def shortened(trainer_pods: int) -> list[Manifest]:
    """The overlay with fewer iterations and without the Kubernetes API, which no kubelet has."""
    changed = copy.deepcopy(list(overlay("dev-cpu")))
    trainer = find(changed, "StatefulSet", "trainer")
    trainer["spec"]["replicas"] = trainer_pods
    ranks = environment(containers(pod_template(trainer))[0])["TANDEM_RANKS_PER_HOST"]
    ranks["value"] = str(int(ranks["value"]) // trainer_pods)
    data = find(changed, "ConfigMap", "run-config")["data"]
    for before, after in (("iterations: 40", f"iterations: {ITERATIONS}"), ("kind: kubernetes", "kind: registry")):
        assert data["run.yaml"].count(before) == 1
        data["run.yaml"] = data["run.yaml"].replace(before, after)
    return changed


@pytest.fixture(params=[1, 2], ids="{} trainer pods".format)
def kubelet(
    request: pytest.FixtureRequest, docker: Engine, images: dict[str, str], redis_image: str, tmp_path: Path
) -> Iterator[FakeKubelet]:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: the pods were not run; only root can hand folders to their users")
    manifests = shortened(request.param)
    wanted = {each["image"] for template in pod_templates(manifests).values() for each in containers(template)}
    assert wanted == {*images.values(), redis_image}
    # Some network that is not taken: the engine refuses one that is.
    number = uuid.uuid4().int % 200
    made = FakeKubelet(docker, manifests, tmp_path, f"tandem-pods-{number}", f"10.89.{number}")
    try:
        yield made
    finally:
        made.close()


def test_the_pods_of_dev_cpu_run_the_demo(kubelet: FakeKubelet) -> None:
    # In the order in which a kubelet might: what is missing is waited for.
    for name in sorted(kubelet.pods, key=ORDER.index):
        kubelet.start(name)
    for name in kubelet.pods:
        until(partial(kubelet.succeeds, name, "startupProbe"), READY_S, interval_s=LOOK_S)
    until(lambda: not kubelet.is_running("coordinator"), RUN_S, interval_s=LOOK_S)
    assert kubelet.exit_code("coordinator") == 0, kubelet.logs("coordinator")

    results = kubelet.claim("run") / "arithmetic"
    assert json.loads((results / "summary.json").read_text())["iterations"] == ITERATIONS
    assert json.loads((results / "hf" / "config.json").read_text())["model_type"] == "qwen3"

    # The run is over, its pods still serve the last version, and end when asked to, by themselves.
    for name in set(kubelet.pods) - {"coordinator"}:
        assert kubelet.succeeds(name, "readinessProbe"), name
    for name in ("rollout-1", "rollout-0", "trainer-0", "redis-0"):
        assert kubelet.terminate(name) == (143 if name == "trainer-0" else 0), name  # --interrupted-exit
    if "trainer-1" in kubelet.pods:  # rank 0 has taken it along
        until(lambda: not kubelet.is_running("trainer-1"), STOP_S, interval_s=LOOK_S)
        assert kubelet.exit_code("trainer-1") == 0
