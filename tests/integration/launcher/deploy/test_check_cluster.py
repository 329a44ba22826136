"""What `tandem deploy new` and `check` find out about the cluster before anything is applied."""

from pathlib import Path

import pytest

from launcher.deploy.running.kinds import KINDS
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.integration.launcher.deploy.conftest import ANSWERS, Deploy, Done, write_run
from tests.manifests.kustomize import build

pytestmark = pytest.mark.integration


def new(deploy: Deploy, tmp_path: Path, *more: str) -> Done:
    return deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS, *more)


def test_nothing_is_wrong_and_nothing_was_changed(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    before = dict(cluster.objects)
    done = new(deploy, tmp_path)
    assert done.code == 0, done.text
    assert "warning" not in done.text
    assert cluster.objects == before
    assert cluster.seen["create pods"] == 4  # all of them dry runs


def dns_blocks(folder: Path) -> list[str]:
    """The addresses that the policy `dns` opens."""
    build.cache_clear()  # the folder is written again
    (policy,) = [each for each in build(folder) if each["metadata"]["name"] == "math-dns"]
    return [peer["ipBlock"]["cidr"] for peer in policy["spec"]["egress"][0]["to"] if "ipBlock" in peer]


USUAL = ["169.254.20.10/32", "169.254.169.254/32"]


def test_the_address_of_dns_is_open_to_pods(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    """There NodeLocal DNSCache answers, where kube-proxy uses iptables."""
    assert new(deploy, tmp_path).code == 0
    assert dns_blocks(tmp_path / "math") == [*USUAL, "10.96.0.10/32"]
    service = cluster.get("Service", "kube-dns", "kube-system")
    service["spec"]["clusterIPs"] = ["10.96.0.10", "fd00:10:96::a"]
    cluster.put(service)
    done = deploy("check", "math")
    assert done.code == 0
    assert "NetworkPolicy = dns\n    is closed to fd00:10:96::a, the cluster's DNS" in done.text
    assert new(deploy, tmp_path, "--force").code == 0
    assert dns_blocks(tmp_path / "math") == [*USUAL, "10.96.0.10/32", "fd00:10:96::a/128"]
    assert "NetworkPolicy" not in deploy("check", "math").text


def test_an_address_that_is_open_at_other_ports_is_closed_to_dns(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path
) -> None:
    """The component admits 10.0.0.0/8 at Redis' ports; and an edited block may name a host of a network."""
    assert new(deploy, tmp_path, "--component", "external-redis", "--offline").code == 0
    closed = "is closed to 10.96.0.10, the cluster's DNS"
    assert closed in deploy("check", "math").text
    file = tmp_path / "math" / "kustomization.yaml"
    block = "[{op: add, path: /spec/egress/0/to/-, value: {ipBlock: {cidr: 10.96.0.10/16}}}]"
    entry = f"- target: {{kind: NetworkPolicy, name: dns}}\n  patch: '{block}'"
    file.write_text(file.read_text().replace("patches:\n", f"patches:\n{entry}\n"))
    assert closed not in deploy("check", "math").text


def test_an_address_of_dns_that_may_not_be_read_is_said(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.refuse("get services kube-dns")
    done = new(deploy, tmp_path)
    assert done.code == 0, done.text
    assert "whether pods may ask the cluster's DNS at its address was not checked" in done.text
    assert "get service kube-system/kube-dns" in done.text
    assert dns_blocks(tmp_path / "math") == USUAL


def test_a_pod_that_the_server_refuses_with_the_runs_labels(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Without the run's id nothing is twice, and the trial would pass."""
    assert new(deploy, tmp_path).code == 0
    patch = tmp_path / "math" / "sizes.yaml"
    term = "{topologyKey: zone, matchLabelKeys: [tandem.run/id], labelSelector: {matchLabels: {tandem.run/id: math}}}"
    affinity = f"affinity: {{podAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: [{term}]}}}}"
    patch.write_text(patch.read_text().replace("    spec:\n", f"    spec:\n      {affinity}\n"))
    done = deploy("check", "math")
    assert done.code == 2, done.text
    assert "the API server refuses its pods" in done.text
    assert "exists in both matchLabelKeys and labelSelector" in done.text


@pytest.mark.parametrize("kind", ["JobSet", "LeaderWorkerSet", "StatefulSet", "Pod"])
def test_an_id_whose_sets_or_pods_are_left_is_taken(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path, kind: str
) -> None:
    cluster.installed |= set(CONTROLLERS)
    head = {"name": "left", "namespace": "team", "labels": {"tandem.run/id": "math"}}
    (version,) = [each.api_version for each in KINDS if each.name == kind]
    cluster.put({"apiVersion": version, "kind": kind, "metadata": head, "spec": {}})
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert f"RUN = math\n    is taken in namespace team: {kind} left since" in done.text
    # Nor does a kind that may not be listed hide it.
    cluster.refuse("list deployments")
    assert f"is taken in namespace team: {kind} left since" in new(deploy, tmp_path).text
    cluster.delete(kind, "left", "team")
    assert "whether the run's id is taken was not checked" in new(deploy, tmp_path).text


def test_gpus_that_no_node_offers(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        cluster.node(name, 4, "nvidia.com/gpu:NoSchedule")
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert "StatefulSet/trainer" in done.text.replace("math-", "")
    assert "the most nvidia.com/gpu of one is 4 (gpu-a)" in done.text
    assert not (tmp_path / "math").exists()
    assert new(deploy, tmp_path, "--offline").code == 0


def test_a_taint_that_is_not_tolerated(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        cluster.node(name, 8, "nvidia.com/gpu:NoSchedule", "lab:NoExecute")
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert "3 more have taints that are not tolerated: lab:NoExecute" in done.text
    assert new(deploy, tmp_path, "--toleration", "lab:NoExecute").code == 0


def test_a_label_that_no_node_has(deploy: Deploy, tmp_path: Path) -> None:
    done = new(deploy, tmp_path, "--node-selector", "pool=tpu")
    assert done.code == 2, done.text
    assert "none is labelled pool=tpu" in done.text


def test_too_few_nodes_for_all_pods_is_a_warning(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    del cluster.objects["Node", "", "gpu-b"], cluster.objects["Node", "", "gpu-c"]
    done = new(deploy, tmp_path)
    assert done.code == 0
    assert (
        "1 of 2 pods find no room if all nodes were empty: nodes that they may use have 8 nvidia.com/gpu" in done.text
    )


def other(cluster: FakeCluster, node: str, gpus: int, namespace: str = "default", run: str = "", **status: str) -> None:
    """A pod that holds GPUs of a node."""
    limits = {"nvidia.com/gpu": str(gpus)}
    labels = {"tandem.run/id": run} if run else {}
    spec = {"nodeName": node, "containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]}
    cluster.pod_of(f"other-{node}-{run}", namespace, {"metadata": {"labels": labels}, "spec": spec}, **status)


def test_a_run_fits_beside_the_pods_of_others_or_is_said_not_to(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path
) -> None:
    # Two trainer pods of 8 GPUs, three rollouts of 2: the trainer takes whole nodes, though it is made last.
    other(cluster, "gpu-a", 2)
    done = new(deploy, tmp_path)
    assert (done.code, "warning" in done.text) == (0, False), done.text
    other(cluster, "gpu-b", 1)
    done = deploy("check", "math")
    assert done.code == 0
    text = "1 of 2 pods find no room now, beside the pods of others: nodes that they may use have 21 nvidia.com/gpu, at"
    assert text in done.text
    assert "StatefulSet/math-trainer" in done.text
    # What has ended holds nothing, and what is the run's own is not in its way.
    other(cluster, "gpu-b", 1, phase="Succeeded")
    other(cluster, "gpu-b", 8, namespace="team", run="math")
    assert "find no room" not in deploy("check", "math").text
    other(cluster, "gpu-c", 8, run="math")  # of the same id, in another namespace
    assert "find no room" in deploy("check", "math").text
    cluster.refuse("list pods")
    assert "nodes are taken to be empty" in deploy("check", "math").text


def test_nodes_without_the_label_of_every_kubelet_take_no_rollouts(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path
) -> None:
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        node = cluster.get("Node", name, "")
        node["metadata"]["labels"].pop("kubernetes.io/os")
        cluster.put(node)
    told = new(deploy, tmp_path).text
    assert "3 of 3 pods find no room if all nodes were empty: no node that has room is near pods with " in told
    assert "app.kubernetes.io/component=trainer" in told
    assert "tandem.run/id=math by its label kubernetes.io/os" in told


def test_rollouts_whose_trainer_finds_no_room_wait_for_it_and_not_for_gpus(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path
) -> None:
    other(cluster, "gpu-a", 1)
    other(cluster, "gpu-b", 1)
    other(cluster, "gpu-c", 1)
    told = new(deploy, tmp_path).text
    assert "2 of 2 pods find no room now, beside the pods of others: nodes that they may use have 21 nvidia" in told
    assert "3 of 3 pods find no room now, beside the pods of others: no node that has room is near pods with" in told


def quota(cluster: FakeCluster, hard: dict[str, str], used: dict[str, str], **spec: object) -> None:
    head = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "lab", "namespace": "team"}}
    cluster.put({**head, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used}})


def test_quotas_are_summed_over_all_pods(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    gpus = "requests.nvidia.com/gpu"
    quota(cluster, {gpus: "22", "pods": "7", "count/pods": "7", "services": "1"}, {gpus: "0", "services": "1"})
    done = new(deploy, tmp_path)
    assert (done.code, "warning" in done.text) == (0, False), done.text
    quota(cluster, {gpus: "21"}, {gpus: "0"})
    done = deploy("check", "math")
    assert done.code == 2, done.text
    assert f"ResourceQuota/lab = {gpus}: 21" in done.text
    asked = "the run's pods ask for 22 in all (StatefulSet/math-rollout 6, StatefulSet/math-trainer 16)"
    assert asked in done.text
    # Others have a part of it now, and may end; the run's own pods are counted once.
    quota(cluster, {gpus: "30"}, {gpus: "10"})
    done = deploy("check", "math")
    assert done.code == 0
    assert f"{asked}, and others use 10" in done.text
    other(cluster, "gpu-a", 8, namespace="team", run="math")
    assert "and others use" not in deploy("check", "math").text


@pytest.mark.parametrize(
    ("hard", "said"),
    [
        ({"pods": "6"}, "ask for 7 in all"),
        ({"limits.cpu": "100"}, "StatefulSet/math-trainer 128"),
        ({"memory": "1Ti"}, "StatefulSet/math-trainer 1024Gi"),
    ],
)
def test_a_quota_of_any_resource_is_compared(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path, hard: dict[str, str], said: str
) -> None:
    quota(cluster, hard, {})
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert said in done.text


def test_a_quota_counts_only_the_pods_in_its_scope(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    none = {"pods": "0"}
    quota(cluster, none, {}, scopes=["BestEffort"])
    assert new(deploy, tmp_path).code == 0
    for operator, values, code in (("In", ["high"], 0), ("NotIn", ["high"], 2), ("Exists", None, 0)):
        term = {"scopeName": "PriorityClass", "operator": operator} | ({"values": values} if values else {})
        quota(cluster, none, {}, scopeSelector={"matchExpressions": [term]})
        assert deploy("check", "math").code == code, operator


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
def test_a_claim_of_the_wrong_mode(deploy: Deploy, cluster: FakeCluster, tmp_path: Path, mode: str) -> None:
    cluster.claim("run", "team", mode)
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert f"claim = run\n    has the mode {mode}" in done.text
    assert "ReadWriteMany" in done.text


def test_one_node_needs_no_claim_of_many(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    for name in ("run", "models"):
        cluster.claim(name, "team", "ReadWriteOnce")
    small = write_run(tmp_path, trainer={"data_parallel": 1}, rollout={"replicas": 2})
    done = deploy("new", "math", "-c", str(small), *ANSWERS, "--overlay", "single-node-gpu")
    assert done.code == 0, done.text
    cluster.claim("run", "team", "ReadWriteOncePod")
    assert deploy("check", "math").code == 2


def test_a_claim_that_does_not_exist(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    done = new(deploy, tmp_path, "--run-claim", "nfs", "--models-claim", "models")
    assert done.code == 2, done.text
    assert "claim = nfs\n    does not exist in namespace team" in done.text
    del cluster.objects["PersistentVolumeClaim", "team", "run"]
    done = new(deploy, tmp_path)
    assert done.code == 0
    assert "kubectl apply -k math/once" in done.text


def test_a_namespace_that_enforces_what_pods_break(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    enforced = {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": enforced})
    assert new(deploy, tmp_path).code == 0
    patch = tmp_path / "math" / "sizes.yaml"
    patch.write_text(
        patch.read_text().replace(
            "- name: rollout\n",
            "- name: rollout\n        securityContext: {privileged: true, allowPrivilegeEscalation: true}\n",
        )
    )
    done = deploy("check", "math")
    assert done.code == 2, done.text
    assert "the namespace team does not admit its pods" in done.text
    assert 'violates PodSecurity "restricted:latest": privileged (container "rollout"' in done.text


def test_a_quota_that_pods_exceed(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.refuse("create pods", message="exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, limited: 4")
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert "exceeded quota: gpus" in done.text


def test_an_id_that_is_taken(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    labels = {"tandem.run/id": "math", "app.kubernetes.io/component": "coordinator"}
    cluster.put(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "its-job", "namespace": "team", "labels": labels},
        }
    )
    done = new(deploy, tmp_path)
    assert done.code == 2, done.text
    assert "RUN = math\n    is taken in namespace team: Job its-job since" in done.text
    assert new(deploy, tmp_path, "--offline").code == 0


def test_the_namespace_and_the_secret_may_come_later(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    del cluster.objects["Secret", "team", "redis-auth"]
    done = new(deploy, tmp_path)
    assert done.code == 0
    assert "Secret = redis-auth\n    does not exist" in done.text
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis-auth", "namespace": "team"}}
    cluster.put({**head, "data": {"password": "eA=="}})
    done = deploy("check", "math")
    assert done.code == 2, done.text
    assert "has no key" in done.text
    del cluster.objects["Namespace", "", "team"]
    done = deploy("check", "math")
    assert done.code == 0
    assert "namespace = team\n    does not exist yet" in done.text


def test_what_this_account_may_not_read_is_said(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> None:
    for what in ("list nodes", "get secrets", "create pods"):
        cluster.refuse(what)
    done = new(deploy, tmp_path)
    assert done.code == 0, done.text
    for what in ("whether nodes have the GPUs", "the Secret of Redis", "whether the namespace admits the pods"):
        assert f"{what} was not checked" in done.text


def test_without_a_cluster_the_overlay_is_written_with_a_warning(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    done = new(deploy, tmp_path)
    assert done.code == 0
    assert "not compared with a cluster" in done.text
    assert deploy("check", "math").code == 2
    assert deploy("check", "math", "--offline").code == 0
