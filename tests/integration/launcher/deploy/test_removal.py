"""`tandem deploy delete --files`: the folder of this run goes, and nothing else of the claim."""

import json
import os
from pathlib import Path

import pytest

from launcher.deploy.results import remote_removal
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.integration.launcher.deploy.conftest import Deploy
from tests.integration.launcher.deploy.test_live import pods_of
from tests.integration.launcher.deploy.test_results import digests, volume

__all__ = ["volume"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]
IMAGE = "registry.example.com/lab/tandem/coordinator:0.2.0"
DELETE = ("delete", "math", "--yes", "--files")


def own(folder: Path, run: str) -> Path:
    """Make a run's folder, with a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run, "launch_id": ""}))
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
def folder(volume: Path, tmp_path: Path) -> Path:
    """The folder of the run `math`, which is applied; beside it the one of the run `other`."""
    assert volume == tmp_path / "volume" / "math"
    own(tmp_path / "volume" / "other", "other")
    return own(volume, "math")


def test_the_folder_of_the_run_goes_and_all_else_stays(
    deploy: Deploy, cluster: FakeCluster, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    (folder / "hf" / "folder").symlink_to(tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside" / "file")
    (folder / "none").symlink_to(tmp_path / "nothing")
    pods_of(cluster, tmp_path / "math")
    others = digests(folder.parent / "other")
    done = deploy(*DELETE)
    assert done.code == 0, done.text
    assert "files, 3,1" in done.text
    assert not folder.exists()
    assert digests(folder.parent / "other") == others
    assert (tmp_path / "outside" / "file").read_text() == "x"
    assert cluster.names("Pod") == cluster.names("Job") == []
    assert {"run", "models"} <= set(cluster.names("PersistentVolumeClaim"))


def test_without_the_option_the_files_stay(deploy: Deploy, folder: Path) -> None:
    before = digests(folder)
    assert deploy("delete", "math", "--yes").code == 0
    assert digests(folder) == before


def test_of_a_run_that_is_deleted(deploy: Deploy, cluster: FakeCluster, folder: Path) -> None:
    assert deploy("delete", "math", "--yes", "--claims").code == 0
    assert deploy(*DELETE).code == 2
    assert folder.is_dir()
    done = deploy(*DELETE, "--run-claim", "run", "--image", IMAGE)
    assert done.code == 0, done.text
    assert not folder.exists()
    assert "nothing is left" in deploy(*DELETE, "--run-claim", "run", "--image", IMAGE).text


OWNERS = {
    '{"run_id": "other", "launch_id": ""}': "is the folder of run 'other', not of 'math'",
    '{"run_id": 3': "does not say whose folder it is",
    "[]": "does not say whose folder it is",
    "": "has no run.json",
}


def test_a_folder_that_is_not_this_runs_stays(deploy: Deploy, folder: Path) -> None:
    for owner, text in OWNERS.items():
        (folder / "run.json").write_text(owner) if owner else (folder / "run.json").unlink()
        before = digests(folder)
        done = deploy(*DELETE, "--run-claim", "run", "--image", IMAGE)
        assert (done.code, text in done.text) == (2, True), done.text
        assert digests(folder) == before


def test_a_folder_that_has_another_runs_in_it_stays(deploy: Deploy, folder: Path) -> None:
    own(folder / "more" / "other", "other")
    before = digests(folder)
    done = deploy(*DELETE)
    assert (done.code, "more/other is the folder of run 'other'" in done.text) == (2, True), done.text
    assert digests(folder) == before


def test_a_link_to_another_folder_is_not_followed(deploy: Deploy, folder: Path) -> None:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    done = deploy(*DELETE)
    assert (done.code, "is not a folder of its own" in done.text) == (2, True), done.text
    assert folder.with_name("real").is_dir()


def test_a_place_that_is_no_runs_is_refused_before_anything_is_deleted(
    deploy: Deploy, cluster: FakeCluster, folder: Path
) -> None:
    before = dict(cluster.objects)
    for place in ("", "/", "/../run", "/../../other", "/math/../other", "s/math"):
        done = deploy(*DELETE, "--run-dir", f"/var/lib/tandem/run{place}")
        assert (done.code, "is not a folder of its own below" in done.text) == (2, True), done.text
    done = deploy("delete", "math", "--yes", "--run-dir", "/var/lib/tandem/run/math")  # without --files
    assert (done.code, "are of --files" in done.text) == (2, True)
    assert cluster.objects == before


def test_files_stay_while_pods_are_there(deploy: Deploy, cluster: FakeCluster, folder: Path, tmp_path: Path) -> None:
    names = pods_of(cluster, tmp_path / "math")
    pod = cluster.objects["Pod", "team", names["trainer"]]
    cluster.put({**pod, "metadata": {**pod["metadata"], "name": "stays"}})  # of no set that is deleted
    done = deploy(*DELETE, "--timeout-s", "1")
    assert (done.code, "stays" in done.text) == (1, True)
    assert (folder / "run.json").is_file()


def test_files_stay_where_objects_could_not_be_deleted(deploy: Deploy, cluster: FakeCluster, folder: Path) -> None:
    cluster.refuse("delete configmaps")
    assert deploy(*DELETE).code == 1
    assert (folder / "run.json").is_file()


def test_files_stay_while_a_job_copies_them(deploy: Deploy, cluster: FakeCluster, folder: Path) -> None:
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "results-math", "namespace": "team"}}
    cluster.put({**head, "spec": {}, "status": {"active": 1}})
    before = dict(cluster.objects)
    done = deploy(*DELETE)
    assert (done.code, "Job results-math still copies" in done.text) == (1, True)
    assert cluster.objects == before
    cluster.put({**head, "spec": {}, "status": {"succeeded": 1}})
    assert deploy(*DELETE).code == 0


def test_a_stream_that_breaks_is_tried_again(deploy: Deploy, cluster: FakeCluster, folder: Path) -> None:
    cluster.break_after = [0, 0]
    done = deploy(*DELETE)
    assert done.code == 0, done.text
    assert cluster.break_after == []
    assert not folder.exists()


def test_a_stream_that_only_breaks_is_an_error(deploy: Deploy, cluster: FakeCluster, folder: Path) -> None:
    cluster.break_after = [0, 0, 0]
    done = deploy(*DELETE)
    assert (done.code, "the connection" in done.text) == (1, True)
    assert cluster.names("Pod") == []


def test_what_broke_off_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that says whose folder it is goes last."""
    rmdir = os.rmdir

    def fails(path: Path) -> None:
        if Path(path).name == "hf":
            raise OSError(5, "Input/output error")
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", fails)
    with pytest.raises(OSError, match="Input/output error"):
        remote_removal.remove(folder)
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"run.json"}
    monkeypatch.undo()
    remote_removal.check(folder.parent, folder, "math")
    remote_removal.remove(folder)
    assert not folder.exists()
