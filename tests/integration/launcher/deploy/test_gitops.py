"""What Argo CD and Flux do with a run's folder in Git: three commits in a row, by a real kubectl, on a fake cluster.

Argo CD       applies objects one by one on the client's side, and with `PruneLast=true` prunes only after success:
              `kubectl apply -k --prune`
Flux          lets the server try all objects first, and applies and prunes only if none is refused:
              `kubectl apply -k --server-side --force-conflicts`, with `--dry-run=server` before it

Neither of the two is run here. docs/kubernetes.md says what the tests show.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.integration.launcher.deploy.conftest import ANSWERS, Deploy, write_run
from tests.manifests.kustomize import kubectl

pytestmark = [pytest.mark.slow, pytest.mark.integration]

JOB, TRAINER, ROLLOUT = "math-coordinator", "math-trainer", "math-rollout"
PRUNE = ("--prune", "--selector=tandem.run/id=math", "--prune-allowlist=core/v1/ConfigMap")
SERVER_SIDE = ("--server-side", "--force-conflicts")
SERVICES = (f"job/{JOB}", f"statefulset/{TRAINER}", f"statefulset/{ROLLOUT}")
Key = tuple[str, str, str]


class Said(NamedTuple):
    """What kubectl said of objects: `created`, `configured`, `unchanged`, `pruned`; and its errors."""

    words: dict[str, str]
    errors: str


Sync = Callable[[], Said]


class Repository:
    """A Git repository with the run's folder in it, and a checkout that a tool syncs from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._git("init", "--quiet", "--initial-branch", "main")
        self.first = self.commit("the run math")

    def commit(self, message: str) -> str:
        """Returns: the commit."""
        self._git("add", "--all")
        self._git("-c", "user.name=A", "-c", "user.email=a@example.com", "commit", "--quiet", "--message", message)
        return self._git("rev-parse", "HEAD").strip()

    def change(self, file: str, old: str, new: str) -> str:
        """Returns: the commit of a change to a file of the run's folder."""
        path = self.folder / "math" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return self.commit(f"{old} -> {new}")

    def check_out(self, commit: str) -> None:
        self._git("checkout", "--quiet", commit)

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def repository(deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """The run `math`, as `tandem deploy new` writes it."""
    (tmp_path / "git").mkdir()
    monkeypatch.chdir(tmp_path / "git")
    done = deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS)
    assert done.code == 0, done.text
    return Repository(tmp_path / "git")


@pytest.fixture
def argo(repository: Repository) -> Sync:
    return lambda: _apply(repository, *PRUNE)


@pytest.fixture
def flux(repository: Repository) -> Sync:
    def sync() -> Said:
        tried = _apply(repository, *SERVER_SIDE, "--dry-run=server")
        return tried if tried.errors else _apply(repository, *SERVER_SIDE)

    return sync


def _apply(repository: Repository, *options: str) -> Said:
    command = [kubectl(), "apply", "-k", str(repository.folder / "math"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == ("is invalid" not in done.stderr), done.stderr
    words = dict(line.removesuffix(" (server dry run)").split(" ", 1) for line in done.stdout.splitlines())
    return Said(words, done.stderr if done.returncode else "")


def versions(cluster: FakeCluster) -> dict[Key, str]:
    """Every object's version: equal ones mean that nothing was written."""
    return {key: each["metadata"]["resourceVersion"] for key, each in cluster.objects.items()}


def written(cluster: FakeCluster, before: dict[Key, str]) -> set[str]:
    """Objects that were made, changed or deleted since."""
    return {f"{kind}/{name}" for (kind, _, name), _ in versions(cluster).items() ^ before.items()}


def configurations(cluster: FakeCluster) -> set[str]:
    return {f"ConfigMap/{name}" for name in cluster.names("ConfigMap") if "run-config" in name}


def delete(*objects: str) -> None:
    """`kubectl delete` with what the upgrade of docs/kubernetes.md says."""
    command = [kubectl(), "delete", "--namespace", "team", "--cascade=foreground", *objects]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_three_commits_as_argo_cd_applies_them(repository: Repository, cluster: FakeCluster, argo: Sync) -> None:
    made = argo()
    assert (set(made.words.values()), made.errors) == ({"created"}, "")

    # Once more: nothing is written, and kubectl has only PodDisruptionBudgets to say otherwise of.
    before = versions(cluster)
    again = argo()
    assert versions(cluster) == before
    said_otherwise = {name.partition("/")[0] for name, word in again.words.items() if word != "unchanged"}
    assert said_otherwise == {"poddisruptionbudget.policy"}

    # A size: a sync makes it on its own.
    repository.change("kustomization.yaml", "count: 3", "count: 5")
    assert argo().errors == ""
    assert written(cluster, before) == {f"StatefulSet/{ROLLOUT}"}
    assert cluster.get("StatefulSet", ROLLOUT, "team")["spec"]["replicas"] == 5

    # Another configuration: the Job is refused by name, each time, and the configuration that it runs with stays.
    (first,) = configurations(cluster)
    before = versions(cluster)
    repository.change("run.yaml", "iterations: 3", "iterations: 4")
    for _ in range(2):
        refused = argo()
        assert f'Job "{JOB}" is invalid: spec.template: Invalid value' in refused.errors
        assert refused.errors.count('" is invalid: ') == 1
        taken = configurations(cluster) - {first}
        assert written(cluster, before) == {f"StatefulSet/{TRAINER}", f"StatefulSet/{ROLLOUT}", *taken}
        assert first in configurations(cluster)

    # A person deletes the three objects: the next sync starts the run anew, and then prunes.
    delete(*SERVICES)
    anew = argo()
    assert anew.errors == ""
    assert {anew.words[f"job.batch/{JOB}"], anew.words[f"statefulset.apps/{TRAINER}"]} == {"created"}
    assert configurations(cluster) == taken
    before = versions(cluster)
    assert argo().errors == ""
    assert versions(cluster) == before


def test_three_commits_as_flux_applies_them(repository: Repository, cluster: FakeCluster, flux: Sync) -> None:
    assert flux().errors == ""
    before = versions(cluster)
    assert flux().errors == ""
    assert versions(cluster) == before

    repository.change("kustomization.yaml", "count: 3", "count: 5")
    assert flux().errors == ""
    assert written(cluster, before) == {f"StatefulSet/{ROLLOUT}"}

    # Another configuration, another image: nothing is applied at all.
    before = versions(cluster)
    images = "newName: registry.example.com/lab/tandem/"
    for change in (("run.yaml", "iterations: 3", "iterations: 4"), ("kustomization.yaml", images, f"{images}next-")):
        repository.change(*change)
        refused = flux()
        assert f'Job "{JOB}" is invalid: spec.template: Invalid value' in refused.errors
        assert versions(cluster) == before

    delete(*SERVICES)
    assert flux().errors == ""
    assert len(configurations(cluster)) == 2  # of which Flux prunes the first
    before = versions(cluster)
    assert flux().errors == ""
    assert versions(cluster) == before


@pytest.mark.parametrize("tool", ["argo", "flux"])
def test_going_back_to_the_commit_that_runs_needs_no_person(
    tool: str, repository: Repository, cluster: FakeCluster, request: pytest.FixtureRequest
) -> None:
    sync: Sync = request.getfixturevalue(tool)
    sync()
    (first,) = configurations(cluster)
    templates = {name: cluster.get("StatefulSet", name, "team")["spec"] for name in (TRAINER, ROLLOUT)}
    repository.change("run.yaml", "iterations: 3", "iterations: 4")
    assert sync().errors != ""
    repository.check_out(repository.first)
    assert sync().errors == ""
    assert {name: cluster.get("StatefulSet", name, "team")["spec"] for name in (TRAINER, ROLLOUT)} == templates
    assert configurations(cluster) == {first}


@pytest.mark.parametrize("tool", ["argo", "flux"])
def test_a_sync_takes_gpus_again_that_a_run_has_given_back(
    tool: str, cluster: FakeCluster, request: pytest.FixtureRequest
) -> None:
    """Why both must leave the sets' sizes alone."""
    sync: Sync = request.getfixturevalue(tool)
    sync()
    over = cluster.get("StatefulSet", ROLLOUT, "team")
    over["spec"]["replicas"] = 0  # as the coordinator does
    cluster.put(over)
    sync()
    assert cluster.get("StatefulSet", ROLLOUT, "team")["spec"]["replicas"] == 3
