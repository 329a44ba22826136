"""`tandem deploy results`: files through exec of a pod, whole or not at all, however often the stream breaks."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from launcher.deploy.results.fetch import ALWAYS_BYTES, RECORD
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.integration.launcher.deploy.conftest import ANSWERS, Deploy, write_run
from tests.integration.launcher.deploy.test_live import apply
from tests.manifests.kustomize import build

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture
def volume(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> Path:
    """The folder of the run `math` on the claim; the namespace enforces `restricted`."""
    enforced = {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": enforced})
    assert deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS).code == 0
    apply(tmp_path / "math")
    (job,) = (each for each in build(tmp_path / "math") if each["kind"] == "Job")
    values = {each["name"]: each.get("value", "") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    inside = values["TANDEM_RUN_DIR"].replace("$(TANDEM_RUN_ID)", "math").removeprefix("/var/lib/tandem/run").strip("/")
    folder: Path = tmp_path / "volume" / inside
    for name, size in {
        "hf/model.safetensors": 3 * ALWAYS_BYTES,
        "hf/config.json": 20,
        "checkpoints/step-1/a": 9,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (folder / ".token").write_text("a secret")
    (folder / "empty").touch()
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_files_are_those_of_the_run_without_checkpoints(deploy: Deploy, cluster: FakeCluster, volume: Path) -> None:
    done = deploy("results", "math", "--out", "here")
    assert done.code == 0, done.text
    expected = {name: each for name, each in digests(volume).items() if not name.startswith("checkpoints")}
    assert digests(Path("here")) == expected
    assert not (Path("here") / ".token").exists()
    assert cluster.names("Pod") == []
    assert cluster.seen["create pods"] == 1 + 4  # beside the trials of `new`
    assert deploy("results", "math", "--out", "here", "--checkpoints").code == 0
    assert digests(Path("here")) == digests(volume)


def test_in_a_project_of_openshift_the_pods_users_are_the_projects(
    deploy: Deploy, cluster: FakeCluster, volume: Path
) -> None:
    namespace = cluster.get("Namespace", "team", "")
    namespace["metadata"]["annotations"] = {"openshift.io/sa.scc.uid-range": "1000680000/10000"}
    cluster.put(namespace)
    refused = deploy("check", "math")
    assert refused.code == 2, refused.text
    assert "must be in the ranges" in refused.text
    assert "--component openshift" in refused.text
    done = deploy("new", "math", "-c", "my.yaml", *ANSWERS, "--force", "--component", "openshift")
    assert done.code == 0, done.text
    done = deploy("results", "math", "--only", "hf")
    assert done.code == 0, done.text


def test_only_what_is_named(deploy: Deploy, volume: Path) -> None:
    assert deploy("results", "math", "--only", "hf").code == 0
    assert set(digests(Path("runs/math"))) == {"hf/model.safetensors", "hf/config.json"}
    done = deploy("results", "math", "--only", "hff")
    assert done.code == 1
    assert "has no hff" in done.text


def test_a_stream_that_breaks_is_continued_where_it_ended(deploy: Deploy, cluster: FakeCluster, volume: Path) -> None:
    cluster.break_after = [10**9, 10**9, 10**9, ALWAYS_BYTES, 1000, 0]  # the list, two small files, then the model
    done = deploy("results", "math", "--out", "here", "--only", "hf", "--only", "empty")
    assert done.code == 0, done.text
    assert digests(Path("here"))["hf/model.safetensors"] == digests(volume)["hf/model.safetensors"]
    assert cluster.break_after == []


def test_a_stream_that_only_breaks_fails_and_a_repeated_command_continues(
    deploy: Deploy, cluster: FakeCluster, volume: Path
) -> None:
    cluster.break_after = [10**9, 2 * ALWAYS_BYTES, *[0] * 5]
    done = deploy("results", "math", "--out", "here", "--only", "hf/model.safetensors")
    assert done.code == 1
    assert "the connection" in done.text
    assert cluster.names("Pod") == []
    part = Path("here/hf/model.safetensors.part")
    assert part.stat().st_size == 2 * ALWAYS_BYTES
    cluster.break_after = [10**9, 2 * ALWAYS_BYTES]  # enough for what is missing, not for all of it
    assert deploy("results", "math", "--out", "here", "--only", "hf/model.safetensors").code == 0
    assert not part.exists()
    assert digests(Path("here"))["hf/model.safetensors"] == digests(volume)["hf/model.safetensors"]


def test_what_was_damaged_on_the_way_or_here_is_copied_again(deploy: Deploy, volume: Path) -> None:
    Path("here/hf").mkdir(parents=True)
    Path("here/hf/model.safetensors.part").write_bytes(b"x" * 1000)  # other bytes than the file begins with
    assert deploy("results", "math", "--out", "here").code == 0
    assert digests(Path("here"))["hf/model.safetensors"] == digests(volume)["hf/model.safetensors"]
    with Path("here/hf/model.safetensors").open("r+b") as file:
        file.write(b"damaged")
    assert "1 were there already" not in deploy("results", "math", "--out", "here").text
    assert digests(Path("here"))["hf/model.safetensors"] == digests(volume)["hf/model.safetensors"]
    assert "1 were there already" in deploy("results", "math", "--out", "here").text
    Path("here", RECORD).write_text("not json")
    assert deploy("results", "math", "--out", "here").code == 0


def test_a_small_file_that_changed_is_copied_again(deploy: Deploy, volume: Path) -> None:
    assert deploy("results", "math", "--out", "here").code == 0
    (volume / "metrics.jsonl").write_text('{"iteration": 2}\n')
    assert deploy("results", "math", "--out", "here").code == 0
    assert digests(Path("here"))["metrics.jsonl"] == digests(volume)["metrics.jsonl"]


def test_results_of_a_run_that_is_deleted(deploy: Deploy, volume: Path, cluster: FakeCluster) -> None:
    assert deploy("delete", "math", "--yes", "--claims").code == 0
    done = deploy("results", "math")
    assert done.code == 2
    inside = f"/var/lib/tandem/run/{volume.relative_to(Path('volume').absolute())}".removesuffix("/.")
    again = ["--run-claim", "run", "--image", "registry.example.com/tandem/coordinator:0.2.0", "--run-dir", inside]
    done = deploy("results", "math", *again)
    assert done.code == 0, done.text
    assert "hf/config.json" in digests(Path("runs/math"))


def test_a_claim_without_the_runs_folder(deploy: Deploy, volume: Path) -> None:
    done = deploy("results", "math", "--run-dir", "/var/lib/tandem/run/elsewhere")
    assert done.code == 2
    # The script says it, which has the claim at another place here.
    assert re.search(r"the claim has no folder \S+/elsewhere: the run has not started", done.text)


def test_a_pod_that_cannot_start_says_why(deploy: Deploy, cluster: FakeCluster, volume: Path) -> None:
    cluster.claims.clear()
    done = deploy("results", "math", "--timeout-s", "1")
    assert done.code == 1
    assert 'persistentvolumeclaim "run" not found' in done.text
    assert cluster.names("Pod") == []


def test_names_that_lead_out_of_the_folder_are_refused(
    deploy: Deploy, cluster: FakeCluster, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path("evil.py")
    script.write_text("""print('{"path": "../../outside", "size": 1}')""")
    monkeypatch.setattr("launcher.deploy.results.fetch._SCRIPT", script)
    done = deploy("results", "math", "--out", "here")
    assert done.code == 2
    assert "'../../outside'" in done.text
    assert not Path("../outside").exists()
