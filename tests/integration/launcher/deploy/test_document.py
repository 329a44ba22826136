"""The commands of docs/deploy-command.md, in their order, in a cluster that has nothing yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.house.commands import lines_in
from tests.house.repository import REPO
from tests.integration.launcher.deploy.conftest import write_run
from tests.integration.launcher.deploy.test_live import pods_of
from tests.manifests.kustomize import kubectl

pytestmark = [pytest.mark.slow, pytest.mark.integration]
COMMAND_S = 60.0


@pytest.mark.runs("tandem deploy")
@pytest.mark.runs("kubectl")
def test_the_page_from_a_runs_yaml_to_its_end(tmp_path: Path) -> None:
    kubectl()
    write_run(tmp_path)
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with FakeCluster("default") as cluster:
        environ = {**os.environ, "PATH": paths, "KUBECONFIG": str(cluster.write_kubeconfig(tmp_path / "kubeconfig"))}
        for name in ("gpu-a", "gpu-b", "gpu-c"):
            cluster.node(name, 8, "nvidia.com/gpu:NoSchedule")
        cluster.node("cpu", 0)
        (tmp_path / "volume" / "math" / "hf").mkdir(parents=True)
        for folder in (tmp_path / "volume", tmp_path / "volume" / "math"):
            (folder / "hf").mkdir(exist_ok=True)
            (folder / "hf" / "config.json").write_text("{}")
        (tmp_path / "volume" / "math" / "run.json").write_text('{"run_id": "math", "launch_id": ""}')
        cluster.claims = {"run": tmp_path / "volume"}
        for line in lines_in(REPO / "docs" / "deploy-command.md"):
            done = subprocess.run(
                ["bash", "-ec", line],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            if line.endswith("kubectl apply -k math"):
                for pod in pods_of(cluster, tmp_path / "math").values():
                    cluster.logs[pod] = ["a line"]
        assert cluster.names("Job") == ["fetch-qwen2-5-7b", "fetch-rows", "results-math"]
        assert cluster.names("StatefulSet") == cluster.names("Pod") == []
        assert {"run", "models"} <= set(cluster.names("PersistentVolumeClaim"))
        assert not (tmp_path / "volume" / "math").exists()
        assert (tmp_path / "volume" / "hf" / "config.json").read_text() == "{}"
        assert (tmp_path / "math-results" / "hf" / "config.json").read_text() == "{}"
