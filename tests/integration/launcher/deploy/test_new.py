"""`tandem deploy new` and `check`: what is written, what it builds to with the real kubectl, and what is refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.cluster.admission import check_pod
from tests.fakes.cluster.controllers import pods_of
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.integration.launcher.deploy.conftest import ANSWERS, Deploy, write_run
from tests.manifests.kustomize import (
    COMPONENTS,
    build,
    component_of,
    containers,
    environment,
    kinds,
    label,
    matches,
    pod_template,
    workloads,
)
from tests.manifests.test_many_runs import pod_selectors

pytestmark = pytest.mark.integration


def new(deploy: Deploy, tmp_path: Path, *more: str, **sections: Any) -> Path:
    """An overlay `math`, without an error."""
    done = deploy("new", "math", "-c", str(write_run(tmp_path, **sections)), *ANSWERS, *more)
    assert done.code == 0, done.text
    return tmp_path / "math"


def of(folder: Path) -> dict[str, Any]:
    """The workloads of a built overlay, by component."""
    return {component_of(pod_template(each)): each for each in workloads(build(folder))}


def limits(workload: Any) -> dict[str, str]:
    (container,) = containers(pod_template(workload))
    found: dict[str, str] = container["resources"]["limits"]
    return found


def test_pods_and_gpus_follow_from_the_runs_layout(deploy: Deploy, tmp_path: Path) -> None:
    found = of(new(deploy, tmp_path))
    trainer, rollout = found["trainer"], found["rollout"]
    # 4 x 4 ranks on nodes of 8 GPUs.
    assert trainer["spec"]["replicas"] == 2
    assert limits(trainer)["nvidia.com/gpu"] == "8"
    (container,) = containers(pod_template(trainer))
    assert environment(container)["TANDEM_RANKS_PER_HOST"]["value"] == "8"
    assert (rollout["spec"]["replicas"], limits(rollout)["nvidia.com/gpu"]) == (3, "2")


def test_all_objects_are_of_the_run_in_its_namespace_and_none_is_shared(deploy: Deploy, tmp_path: Path) -> None:
    folder = new(deploy, tmp_path)
    built = build(folder)
    assert {each["metadata"]["namespace"] for each in built} == {"team"}
    assert {each["metadata"]["labels"]["tandem.run/id"] for each in built} == {"math"}
    assert {each["kind"] for each in built}.isdisjoint({"Namespace", "ClusterQueue"})
    claims = {each["metadata"]["name"] for each in built if each["kind"] == "PersistentVolumeClaim"}
    assert not {"run", "models"} & claims
    for workload in workloads(built):
        assert pod_template(workload)["metadata"]["labels"]["tandem.run/id"] == "math"
    once = build(folder / "once")
    assert {each["kind"] for each in once} == {"Namespace", "PersistentVolumeClaim"}
    assert all("tandem.run/id" not in each["metadata"]["labels"] for each in once)
    assert {each["metadata"].get("namespace", "team") for each in once} == {"team"}


def test_images_come_from_the_registry(deploy: Deploy, tmp_path: Path) -> None:
    for component, workload in of(new(deploy, tmp_path)).items():
        (container,) = containers(pod_template(workload))
        if component != "redis":
            assert container["image"].startswith(f"registry.example.com/lab/tandem/{component}:")


def test_images_are_pinned_by_what_make_images_printed(deploy: Deploy, tmp_path: Path) -> None:
    entries = [
        {
            "name": f"registry.invalid/tandem/{name}",
            "newName": f"r.example/t/tandem/{name}",
            "digest": "sha256:" + "0" * 64,
        }
        for name in ("coordinator", "trainer", "rollout")
    ]
    (tmp_path / "images.yaml").write_text(yaml.safe_dump({"images": entries}))
    found = of(new(deploy, tmp_path, "--images", "images.yaml"))
    (container,) = containers(pod_template(found["trainer"]))
    assert container["image"] == f"r.example/t/tandem/trainer@sha256:{'0' * 64}"
    (tmp_path / "images.yaml").write_text(yaml.safe_dump({"images": entries[:1]}))
    done = deploy("new", "second", "-c", "my.yaml", *ANSWERS, "--images", "images.yaml")
    assert done.code == 2, done.text
    assert "--images names no rollout, trainer" in done.text


def test_nodes_claims_and_classes_are_as_asked_for(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.claim("nfs-runs", "team", "ReadWriteMany")
    cluster.claim("nfs-models", "team", "ReadWriteMany")
    more = ["--run-claim", "nfs-runs", "--models-claim", "nfs-models", "--node-selector", "pool=gpu"]
    folder = new(deploy, tmp_path, *more, "--toleration", "lab=math:NoExecute")
    assert not (folder / "once" / "claims.yaml").exists()
    assert [each["kind"] for each in build(folder / "once")] == ["Namespace"]
    for component, workload in of(folder).items():
        spec = pod_template(workload)["spec"]
        mounted = {each.get("persistentVolumeClaim", {}).get("claimName") for each in spec["volumes"]} - {
            None,
            "math-redis",
        }
        assert mounted <= {"nfs-runs", "nfs-models"}
        if component in ("trainer", "rollout"):
            assert spec["nodeSelector"] == {"pool": "gpu"}
            assert {each["key"] for each in spec["tolerations"]} == {"lab", "nvidia.com/gpu"}
    assert {"persistentVolumeClaim": {"claimName": "nfs-runs"}, "name": "run"} in pod_template(of(folder)["trainer"])[
        "spec"
    ]["volumes"]


def test_a_storage_class_is_that_of_all_claims(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.put({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"}})
    folder = new(deploy, tmp_path, "--storage-class", "fast")
    claims = [each for each in (*build(folder), *build(folder / "once")) if each["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == 3
    assert {each["spec"]["storageClassName"] for each in claims} == {"fast"}
    done = deploy("new", "second", "-c", "my.yaml", *ANSWERS, "--storage-class", "fsat")
    assert (done.code, "--storage-class = fsat" in done.text) == (2, True)


def test_a_reward_file_beside_the_configuration_goes_with_it(deploy: Deploy, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(completion: str) -> float:\n    return 1.0\n")
    folder = new(deploy, tmp_path, reward={"kind": "function", "function": "mine.py:short"})
    config = next(
        each for each in build(folder) if each["metadata"]["name"].startswith(("run-config", "math-run-config"))
    )
    assert set(config["data"]) == {"run.yaml", "mine.py"}
    assert config["data"]["run.yaml"] == (tmp_path / "my.yaml").read_text()


@pytest.mark.parametrize(
    "setting", [{"function": "mine.py:Env"}, {"tools": ["mine.py:add", "mine.py:sub", "more.py:f"]}]
)
def test_files_of_an_environment_go_with_it_and_are_where_pods_read_them(
    deploy: Deploy, tmp_path: Path, setting: dict[str, Any]
) -> None:
    for name in ("mine.py", "more.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    built = build(new(deploy, tmp_path, environment=setting))
    config = next(each for each in built if each["metadata"]["name"].startswith("math-run-config"))
    files = {"run.yaml", "mine.py"} | ({"more.py"} if "tools" in setting else set())
    assert {name: text for name, text in config["data"].items() if name != "run.yaml"} == {
        name: f"# {name}\n" for name in files - {"run.yaml"}
    }
    (workload,) = [each for each in workloads(built) if component_of(pod_template(each)) == "coordinator"]
    (container,) = containers(pod_template(workload))
    (mounted,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/tandem"]
    (volume,) = [each for each in pod_template(workload)["spec"]["volumes"] if each["name"] == mounted["name"]]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert "items" not in volume["configMap"]  # all files


def test_a_tool_elsewhere_is_named(deploy: Deploy, tmp_path: Path) -> None:
    done = deploy("new", "math", "-c", str(write_run(tmp_path, environment={"tools": ["/home/me/x.py:f"]})), *ANSWERS)
    assert done.code == 2, done.text
    assert "environment.tools = /home/me/x.py" in " ".join(done.text.split())


def test_the_folder_needs_no_checkout(deploy: Deploy, tmp_path: Path) -> None:
    folder = new(deploy, tmp_path)
    before = build(folder)
    moved = tmp_path / "git" / "runs" / "elsewhere"
    moved.parent.mkdir(parents=True)
    folder.rename(moved)
    assert build(moved) == before
    assert not [path for path in moved.rglob("*") if path.is_symlink()]


GROUPS: dict[str, Any] = {
    "rollout": {"replicas": 1, "tensor_parallel": 16, "nodes": 2},
    "fleet": {"rollout_set_kind": "LeaderWorkerSet", "trainer_set_kind": "JobSet"},
}
# Those that go with each other, in an order in which people write them.
TOGETHER = [
    ("monitoring", "reward-server", "environment-server", "openshift", "autoscale-rollout"),
    ("mtls", "gpu-nccl", "disk-transport", "gpu-nodes"),
    ("external-redis", "tracing", "pull-secret", "gpu-nccl/ipc-lock", "standby-coordinator"),
    ("jobset-trainer", "kueue", "gpu-nodes/priority", "gpu-nodes/runtime-class"),
    ("jobset-trainer", "lws-rollout", "monitoring", "mtls", "openshift"),
    ("lws-rollout", "autoscale-rollout", "external-redis", "tracing", "names"),
]


@pytest.mark.parametrize("components", TOGETHER, ids="+".join)
def test_components_are_added(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path, components: tuple[str, ...]
) -> None:
    """All objects are of the run, so that it is found and deleted whole; pods are what an API server takes."""
    more = [word for each in components for word in ("--component", each)]
    sections = (
        GROUPS if "lws-rollout" in components else {"fleet": {**GROUPS["fleet"], "rollout_set_kind": "StatefulSet"}}
    )
    built = build(new(deploy, tmp_path, *more, **sections))
    for each in built:
        assert each["metadata"]["labels"]["tandem.run/id"] == "math", label(each)
        assert each["metadata"]["namespace"] == "team"
        for selector, component in itertools.product(pod_selectors(each), SERVICES):
            other = {"app.kubernetes.io/component": component, "tandem.run/id": "other"}
            assert not matches(selector, {"app.kubernetes.io/name": "tandem", **other}), f"{label(each)}: {selector}"
    pods = [pod for workload in workloads(built) for pod in pods_of(workload)]
    for pod in pods:
        check_pod(cluster.get("Namespace", "team", ""), pod, pod["metadata"]["name"])
        assert pod["metadata"]["labels"]["tandem.run/id"] == "math"
    assert len(pods) >= 5
    done = deploy("check", "math")
    assert done.code == 0, done.text


SERVICES = ("coordinator", "trainer", "rollout", "rollout-worker", "redis", "reward-server", "environment-server")


def test_components_are_all_in_one_of_these() -> None:
    assert {*COMPONENTS} - {"single-node"} <= {each for together in TOGETHER for each in together}


def test_objects_without_the_runs_id_are_named(deploy: Deploy, tmp_path: Path) -> None:
    """An overlay of an earlier Tandem, which had the labels in the lower kustomization only."""
    components = ["--component", "lws-rollout", "--component", "jobset-trainer"]
    folder = new(deploy, tmp_path, *components, **GROUPS)
    upper = yaml.safe_load((folder / "kustomization.yaml").read_text())
    lower = yaml.safe_load((folder / "run" / "kustomization.yaml").read_text())
    lower["labels"] = upper.pop("labels")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(upper))
    (folder / "run" / "kustomization.yaml").write_text(yaml.safe_dump(lower))
    done = deploy("check", "math", "--offline")
    assert done.code == 2, done.text
    for name in ("JobSet/math-trainer", "LeaderWorkerSet/math-rollout", "NetworkPolicy/math-rollout-worker"):
        assert f"{name}\n    has tandem.run/id=None, not math" in done.text, done.text


def test_engines_over_several_nodes_are_groups(deploy: Deploy, tmp_path: Path) -> None:
    sections = {
        "rollout": {"replicas": 1, "tensor_parallel": 24, "nodes": 3},
        "fleet": {"rollout_set_kind": "LeaderWorkerSet"},
    }
    folder = new(deploy, tmp_path, "--component", "lws-rollout", **sections)
    spec = of(folder)["rollout"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 3)
    alone = deploy("new", "second", "-c", "my.yaml", *ANSWERS)
    assert alone.code == 2
    assert "--component lws-rollout" in alone.text


def test_a_single_nodes_claims_are_made_once_and_need_no_shared_storage(deploy: Deploy, tmp_path: Path) -> None:
    once = build(new(deploy, tmp_path, "--overlay", "single-node-gpu", "--gpus-per-node", "22", "--offline") / "once")
    claims = {each["metadata"]["name"]: each["spec"]["accessModes"] for each in kinds(once, "PersistentVolumeClaim")}
    assert claims == {"run": ["ReadWriteOnce"], "models": ["ReadWriteOnce"]}


DEMO = Path(__file__).parents[4] / "deploy" / "overlays" / "dev-cpu" / "run.yaml"


def test_the_demo_needs_neither_gpus_nor_a_registry(deploy: Deploy, tmp_path: Path) -> None:
    done = deploy("new", "demo", "-c", str(DEMO), "-n", "team", "--overlay", "dev-cpu")
    assert done.code == 0, done.text
    found = of(tmp_path / "demo")
    assert all("nvidia.com/gpu" not in limits(each) for each in found.values())
    assert (found["trainer"]["spec"]["replicas"], found["rollout"]["spec"]["replicas"]) == (1, 2)


def test_a_second_demo_shares_namespace_and_claim(deploy: Deploy, tmp_path: Path) -> None:
    for run in ("red", "blue"):
        assert deploy("new", run, "-c", str(DEMO), "-n", "team", "--overlay", "dev-cpu").code == 0
    for run in ("red", "blue"):
        built, once = build(tmp_path / run), build(tmp_path / run / "once")
        # What deleting this run's folder with kubectl takes along is its own.
        assert all(each["metadata"]["name"].startswith(f"{run}-") for each in built), run
        assert {each["metadata"]["name"] for each in once} == {"team", "run"}
        volumes = pod_template(of(tmp_path / run)["trainer"])["spec"]["volumes"]
        (claim,) = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
        assert claim["claimName"] == "run"


def test_a_claim_that_exists_is_taken_by_the_demo(deploy: Deploy, tmp_path: Path) -> None:
    demo = ["-c", str(DEMO), "-n", "team", "--overlay", "dev-cpu"]
    assert deploy("new", "demo", *demo, "--run-claim", "mine", "--offline").code == 0
    text = (tmp_path / "demo" / "claims.yaml").read_text()
    assert text.count("claimName: mine") == 2  # coordinator and trainer
    refused = deploy("new", "other", *demo, "--models-claim", "mine", "--offline")
    assert refused.code == 2
    assert "--models-claim = mine" in refused.text


def test_models_that_no_pod_mounts_are_named(deploy: Deploy, tmp_path: Path) -> None:
    config = tmp_path / "demo.yaml"
    config.write_text(DEMO.read_text().replace("/opt/tandem/examples", "/models"))
    done = deploy("new", "demo", "-c", str(config), "-n", "team", "--overlay", "dev-cpu")
    assert done.code == 2, done.text
    for key in ("model.path", "data.train", "data.heldout"):
        assert f"{key} = /models/arithmetic/" in done.text
    assert "no pod mounts /models" in done.text
    assert not (tmp_path / "demo").exists()


def test_answers_that_are_missing_are_named(deploy: Deploy, tmp_path: Path) -> None:
    done = deploy("new", "math", "-c", str(write_run(tmp_path)))
    assert done.code == 2, done.text
    assert "--namespace" in done.text


def test_answers_that_are_missing_are_asked_for_on_a_terminal(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.deploy.options._is_terminal", lambda: True)
    config = str(write_run(tmp_path))
    done = deploy("new", "math", answer=f"{config}\nteam\nregistry.example.com/lab\n8\n")
    assert done.code == 0, done.text
    assert "GPUs of a node (--gpus-per-node)" in done.text
    assert limits(of(tmp_path / "math")["trainer"])["nvidia.com/gpu"] == "8"


BAD = {
    "registry.example.com": (["-r", "lab"], "does not begin with a host name"),
    "placeholder": (["-r", "registry.invalid"], "placeholder"),
    "component": (["--component", "gpu-magic"], "--component = gpu-magic"),
    "overlay": (["--overlay", "clutser"], "--overlay = clutser"),
    "toleration": (["--toleration", "gpu:Never"], "NoSchedule, PreferNoSchedule, NoExecute"),
    "claims and class": (["--run-claim", "a", "--storage-class", "b"], "names one that exists"),
    "claim": (["--run-claim", "A_claim"], "is not the name of a claim"),
    "small nodes": (["--gpus-per-node", "1"], "needs 2 GPUs in a pod, but a node has 1"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_is_named_and_nothing_is_written(deploy: Deploy, tmp_path: Path, bad: str) -> None:
    arguments, expected = BAD[bad]
    done = deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS, *arguments)
    assert done.code == 2, done.text
    assert expected in done.text
    assert not (tmp_path / "math").exists()
    assert not list(tmp_path.glob(".math*"))


@pytest.mark.parametrize("run", ["Math", "math_7b", "-math", "math-", "7b", "m" * 38])
def test_a_run_id_is_a_dns_label_of_at_most_37_characters(deploy: Deploy, tmp_path: Path, run: str) -> None:
    done = deploy("new", "-c", str(write_run(tmp_path)), *ANSWERS, "--out", "x", "--", run)
    assert done.code == 2, done.text
    assert f"RUN = {run}" in done.text
    assert deploy("new", "m" * 37, "-c", "my.yaml", *ANSWERS).code == 0


def test_paths_that_pods_do_not_have_are_named(deploy: Deploy, tmp_path: Path) -> None:
    sections: Any = {"model": {"path": "Qwen2.5-7B"}, "reward": {"kind": "function", "function": "/home/me/x.py:f"}}
    done = deploy("new", "math", "-c", str(write_run(tmp_path, **sections)), *ANSWERS)
    assert done.code == 2, done.text
    assert "model.path" in done.text
    assert "/models/Qwen2.5-7B" in done.text
    assert "/home/me/x.py" in done.text


def test_a_configuration_that_is_wrong_is_refused_by_key(deploy: Deploy, tmp_path: Path) -> None:
    done = deploy("new", "math", "-c", str(write_run(tmp_path, grpo={"groupsize": 8})), *ANSWERS)
    assert done.code == 2, done.text
    assert "groupsize" in done.text


def test_an_overlay_is_not_overwritten_unless_asked_to(deploy: Deploy, tmp_path: Path) -> None:
    folder = new(deploy, tmp_path)
    (folder / "sizes.yaml").write_text((folder / "sizes.yaml").read_text().replace("512Gi", "500Gi"))
    assert deploy("new", "math", "-c", "my.yaml", *ANSWERS).code == 2
    assert "500Gi" in (folder / "sizes.yaml").read_text()
    assert deploy("new", "math", "-c", "my.yaml", *ANSWERS, "--force").code == 0
    assert "500Gi" not in (folder / "sizes.yaml").read_text()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    assert deploy("new", "math", "-c", "my.yaml", *ANSWERS, "--force", "--out", "precious").code == 2
    assert (tmp_path / "precious" / "file").exists()


def test_an_edit_that_does_not_fit_the_configuration_is_found(deploy: Deploy, tmp_path: Path) -> None:
    folder = new(deploy, tmp_path)
    assert deploy("check", "math").code == 0
    kustomization = folder / "kustomization.yaml"
    kustomization.write_text(
        kustomization.read_text()
        .replace("count: 2", "count: 3")
        .replace("count: 3\n- name: rollout\n  count: 3", "count: 3\n- name: rollout\n  count: 1")
    )
    build.cache_clear()
    done = deploy("check", "math", "--offline")
    assert done.code == 2, done.text
    assert "3 pods x 8 ranks" in done.text
    assert "1 replicas, but the run waits for rollout.replicas = 3" in done.text


@pytest.mark.parametrize(
    ("registry", "told"),
    [("lab", "has no registry in its name"), ("registry.invalid", "is a placeholder that no node can pull")],
)
def test_an_edited_name_of_an_image_that_no_node_can_pull_is_found(
    deploy: Deploy, tmp_path: Path, registry: str, told: str
) -> None:
    # The trainer's pods are a JobSet's, which has the image in a place of its own.
    folder = new(deploy, tmp_path, "--component", "jobset-trainer", "--offline")
    (file,) = [each for each in folder.rglob("kustomization.yaml") if "registry.example.com/lab" in each.read_text()]
    file.write_text(file.read_text().replace("registry.example.com/lab", registry))
    done = deploy("check", "math", "--offline")
    assert done.code == 2, done.text
    for image in ("coordinator", "trainer", "rollout"):
        assert f"images = {registry}/tandem/{image}" in done.text
    assert done.text.count(told) == 3
