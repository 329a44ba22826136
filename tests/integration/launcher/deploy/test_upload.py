"""`tandem deploy results --to s3://...`: the Job is admitted, and its command copies to real S3-compatible storage."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.deploy.models import s3 as download
from launcher.deploy.results.upload import MANIFEST, TRIES, main, upload
from launcher.deploy.s3 import PART_BYTES, Bucket, StoredObject
from servicekit.errors import DigestMismatch, Unavailable
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.s3_server import S3Server
from tests.house.repository import REPO
from tests.integration.launcher.deploy.conftest import Deploy
from tests.integration.launcher.deploy.jobs import admit, run_as_pod
from tests.integration.launcher.deploy.test_live import apply_file
from tests.integration.launcher.deploy.test_results import digests, volume

__all__ = ["volume"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]
ROOT = "/var/lib/tandem/run"
TO = ("--to", "s3://lab/runs/math", "--secret", "s3")


def job_of(deploy: Deploy, storage: S3Server, *more: str) -> dict[str, Any]:
    """The Job that copies the results of the run `math`, as it is written."""
    done = deploy("results", "math", *TO, "--endpoint", storage.address, *more)
    assert done.code == 0, done.text
    job: dict[str, Any] = yaml.safe_load(Path("results-math.yaml").read_text())
    return job


def expected(volume: Path, *, checkpoints: bool = False) -> dict[str, str]:
    return {name: each for name, each in digests(volume).items() if checkpoints or not name.startswith("checkpoints")}


def listed(storage: S3Server, prefix: str = "lab/runs/math") -> dict[str, str]:
    """What the manifest says: SHA-256 by name."""
    found = json.loads(storage.get(f"{prefix}/{MANIFEST}"))
    return {name: each["sha256"] for name, each in found["files"].items()}


def kept(storage: S3Server, prefix: str = "runs/math") -> dict[str, str]:
    """What the storage has, but the manifest: SHA-256 by name."""
    names = [key.removeprefix(f"{prefix}/") for key in storage.keys("lab")]
    bodies = {name: storage.get(f"lab/{prefix}/{name}") for name in names if name != MANIFEST}
    return {name: hashlib.sha256(body).hexdigest() for name, body in bodies.items()}


def test_a_job_copies_the_results_and_fetch_brings_them_back(
    deploy: Deploy, cluster: FakeCluster, storage: S3Server, volume: Path, tmp_path: Path
) -> None:
    storage.make_bucket("lab")
    job, claims = job_of(deploy, storage), {ROOT: tmp_path / "volume"}
    apply_file(Path("results-math.yaml"))
    assert cluster.names("Job")[-1] == "results-math"
    admit(cluster, job)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["volumeMounts"][0] == {"name": "run", "mountPath": ROOT, "readOnly": True}
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "run", "readOnly": True}
    key, secret = storage.require_signatures()
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    first = run_as_pod(job, claims, **keys)
    assert first.returncode == 0, first.stderr
    assert "0 were there already" in first.stdout
    again = run_as_pod(job, claims, **keys)
    assert f"0 files, 0 bytes copied and compared; {len(expected(volume))} were there already" in again.stdout
    back = Bucket("lab", {**keys, "AWS_ENDPOINT_URL": storage.address})
    download.fetch(back, "runs/math", tmp_path / "back")
    found = digests(tmp_path / "back")
    del found[MANIFEST]
    assert found == expected(volume)
    manifest = json.loads((tmp_path / "back" / MANIFEST).read_text())
    assert manifest["run"] == "math"
    assert {name: each["sha256"] for name, each in manifest["files"].items()} == found
    wrong = run_as_pod(job, claims, **keys | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert (wrong.returncode, "SignatureDoesNotMatch" in wrong.stderr) == (2, True)
    unknown = run_as_pod(job, claims, **keys | {"AWS_ACCESS_KEY_ID": "unknown"})
    assert (unknown.returncode, "InvalidAccessKeyId" in unknown.stderr) == (2, True)
    half = run_as_pod(job, claims, AWS_ACCESS_KEY_ID=key)
    assert (half.returncode, "one is set without the other" in half.stderr) == (2, True)


def test_a_later_job_adds_what_it_is_asked_for(deploy: Deploy, storage: S3Server, volume: Path, tmp_path: Path) -> None:
    storage.make_bucket("lab")
    claims = {ROOT: tmp_path / "volume"}
    assert run_as_pod(job_of(deploy, storage, "--only", "hf"), claims).returncode == 0
    assert set(kept(storage)) == set(listed(storage)) == {"hf/model.safetensors", "hf/config.json"}
    assert run_as_pod(job_of(deploy, storage, "--checkpoints"), claims).returncode == 0
    assert kept(storage) == listed(storage) == expected(volume, checkpoints=True)


def test_a_wrong_address_or_key_is_not_tried_again(deploy: Deploy, storage: S3Server, volume: Path) -> None:
    """By exit code 2, at which the policy of the Job ends it."""
    (rule,) = job_of(deploy, storage)["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])


def test_what_is_in_the_way_is_said_before(
    deploy: Deploy, cluster: FakeCluster, storage: S3Server, volume: Path
) -> None:
    done = deploy("results", "math", *TO, "--endpoint", storage.address)
    assert "Secret s3 is not in namespace team" in done.text
    apply_file(Path("results-math.yaml"))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3", "namespace": "team"}}
    cluster.put({**secret, "data": {"access-key": "eA==", "secret-key": "eA=="}})
    done = deploy("results", "math", *TO)
    assert "Secret s3" not in done.text
    assert "kubectl delete --namespace team job/results-math" in done.text
    cluster.put({**secret, "data": {"access-key": "eA=="}})
    done = deploy("results", "math", *TO)
    assert (done.code, "Secret s3 in namespace team has no secret-key" in done.text) == (2, True)


PLACES = {
    ("--to", "lab/runs"): "'lab/runs' is no place in S3",
    ("--to", "s3://L/runs"): "'s3://L/runs' is no place in S3",
    ("--to", "s3://lab", "--endpoint", "minio:9000"): "--endpoint 'minio:9000' is not an address",
    ("--endpoint", "https://minio.example.com"): "are of --to",
}


def test_what_cannot_be_a_place_is_named(deploy: Deploy, volume: Path) -> None:
    for arguments, text in PLACES.items():
        done = deploy("results", "math", *arguments)
        assert (done.code, text in done.text) == (2, True), done.text
    assert not Path("results-math.yaml").exists()
    done = deploy("results", "none", *TO)
    assert (done.code, "no run none in namespace team" in done.text) == (2, True)


# ---- the program, in this process ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with three files, of which one is written in parts."""
    folder = tmp_path / "math"
    folder.mkdir()
    (folder / "a.json").write_bytes(b"{}")
    (folder / "b.bin").write_bytes(os.urandom(2 * PART_BYTES + 5))
    (folder / "c.jsonl").write_bytes(b'{"iteration": 1}\n')
    (folder / "run.json").write_text('{"run_id": "math", "launch_id": ""}')
    return folder


NAMES = ("a.json", "b.bin", "c.jsonl")


class WatchedBucket(Bucket):
    """A bucket that calls `before` with every key before it is written, and counts what is read back."""

    def __init__(self, storage: S3Server, before: Callable[[str], None] = lambda key: None) -> None:
        super().__init__("lab", {"AWS_ENDPOINT_URL": storage.address})
        self.before, self.reads, self.writes = before, 0, 0

    def write(self, key: str, *arguments: Any) -> None:
        self.before(key)
        self.writes += 1
        super().write(key, *arguments)

    def read(self, stored: StoredObject) -> Iterator[bytes]:
        self.reads += 1
        return super().read(stored)


class EncryptingBucket(WatchedBucket):
    """A storage that encrypts with keys of its own: its ETags are digests of nothing that we know."""

    def find(self, key: str) -> StoredObject | None:
        found = super().find(key)
        return None if found is None else replace(found, etag=found.etag[::-1])

    def read(self, stored: StoredObject) -> Iterator[bytes]:
        return super().read(replace(stored, etag=stored.etag[::-1]))


def put(bucket: Bucket, folder: Path) -> Any:
    return upload(bucket, "runs/math", folder, "math", NAMES)


def test_what_failed_half_way_is_not_done_and_the_next_attempt_continues(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")

    def fails(key: str) -> None:
        if key.endswith("c.jsonl"):
            raise Unavailable("the storage went away")

    with pytest.raises(Unavailable):
        put(WatchedBucket(storage, fails), folder)
    assert storage.keys("lab") == ["runs/math/a.json", "runs/math/b.bin"]  # and no manifest
    bucket = WatchedBucket(storage)
    assert vars(put(bucket, folder)) == {"files": 1, "size": 17, "kept": 2}
    assert bucket.writes == 2  # the file, the manifest
    assert bucket.reads == 0  # compared by ETag, also the one in parts
    assert kept(storage) == listed(storage) == {name: digests(folder)[name] for name in NAMES}


def test_a_file_that_cannot_be_read_to_its_end_leaves_nothing(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    bucket = Bucket("lab", {"AWS_ENDPOINT_URL": storage.address})

    def breaks() -> Iterator[bytes]:
        yield bytes(PART_BYTES + 1)
        raise OSError(5, "Input/output error")

    for size in (2 * PART_BYTES, PART_BYTES):  # in parts, and in one request
        with pytest.raises(OSError, match="Input/output error"):
            bucket.write("x", breaks(), size, "")
    assert storage.keys("lab") == []


def test_a_file_leaves_the_manifest_before_it_is_replaced(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    put(WatchedBucket(storage), folder)
    (folder / "b.bin").write_bytes(b"another")

    def fails(key: str) -> None:
        if key.endswith("b.bin"):
            raise Unavailable("the storage went away")

    with pytest.raises(Unavailable):
        put(WatchedBucket(storage, fails), folder)
    assert set(listed(storage)) == {"a.json", "c.jsonl"}
    put(WatchedBucket(storage), folder)
    assert kept(storage) == listed(storage) == {name: digests(folder)[name] for name in NAMES}


def test_a_file_that_grows_meanwhile_is_copied_as_it_was(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    before = digests(folder)

    def grows(key: str) -> None:
        if key.endswith("c.jsonl"):
            with (folder / "c.jsonl").open("ab") as file:
                file.write(b'{"iteration": 2}\n')

    put(WatchedBucket(storage, grows), folder)
    assert kept(storage) == listed(storage) == {name: before[name] for name in NAMES}


def test_a_file_that_is_written_over_meanwhile_is_copied_again(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    changes = iter([b"22", b"333"])

    def writes(key: str) -> None:
        if key.endswith("a.json") and (body := next(changes, None)):
            (folder / "a.json").write_bytes(body)

    put(WatchedBucket(storage, writes), folder)
    assert storage.get("lab/runs/math/a.json") == b"333"
    assert kept(storage) == listed(storage)


def test_a_file_that_is_always_written_over_is_an_error(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")

    def writes(key: str) -> None:
        (folder / "a.json").write_bytes(os.urandom(16))

    bucket = WatchedBucket(storage, writes)
    with pytest.raises(DigestMismatch, match=r"a\.json could not be copied whole"):
        put(bucket, folder)
    assert bucket.writes == TRIES
    assert f"runs/math/{MANIFEST}" not in storage.keys("lab")


def test_other_content_under_a_name_is_replaced(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    put(WatchedBucket(storage), folder)
    storage.put("lab/runs/math/a.json", b"[]")  # as long, and by another program
    found, size = hashlib.sha256(b"{}").hexdigest(), (folder / "c.jsonl").stat().st_size
    other = hashlib.sha256((folder / "c.jsonl").read_bytes()).hexdigest()
    WatchedBucket(storage).write("runs/math/c.jsonl", [bytes(size)], size, other)  # with the SHA-256 of what it was
    assert put(WatchedBucket(storage), folder).files == 2
    assert listed(storage)["a.json"] == found
    assert kept(storage) == listed(storage)


def test_where_the_etag_is_no_digest_objects_are_read_back(storage: S3Server, folder: Path) -> None:
    storage.make_bucket("lab")
    bucket = EncryptingBucket(storage)
    put(bucket, folder)
    assert bucket.reads == 3
    assert put(EncryptingBucket(storage), folder).kept == 3
    body = (folder / "b.bin").read_bytes()
    WatchedBucket(storage).write("runs/math/b.bin", [bytes(len(body))], len(body), hashlib.sha256(body).hexdigest())
    assert put(EncryptingBucket(storage), folder).files == 1
    assert kept(storage) == listed(storage)


MEASURED = r"""
import re, sys
import launcher.deploy.s3 as s3
from launcher.deploy.results.upload import main

def kib(name):
    return int(re.search(name + r":\s+(\d+) kB", open("/proc/self/status").read())[1])

s3.PART_BYTES = 5 << 20
before = kib("VmRSS")
code = main(sys.argv[1:])
print(code, kib("VmHWM") - before)
"""


def test_the_memory_of_a_large_file_is_that_of_a_few_parts(storage: S3Server, tmp_path: Path) -> None:
    storage.make_bucket("lab")
    (tmp_path / "math").mkdir()
    with (tmp_path / "math" / "large").open("wb") as file:
        file.truncate(160 << 20)  # none of it on the disk
    command = [sys.executable, "-c", MEASURED, "math", str(tmp_path / "math"), "lab/large"]
    environ = {"PYTHONPATH": str(REPO), "AWS_ENDPOINT_URL": storage.address, "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    code, grown_kib = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    print(f"grown by {int(grown_kib) >> 10} MiB")
    assert int(grown_kib) < 80 << 10


@pytest.fixture
def environ(storage: S3Server, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of the Job, with a bucket `lab`."""
    storage.make_bucket("lab")
    monkeypatch.setenv("AWS_ENDPOINT_URL", storage.address)
    monkeypatch.setattr("launcher.deploy.s3.TRIES", 2)
    return monkeypatch


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["math", "{}", "none/x"], 2, "there is no bucket 'none'"),
        (["math", "{}/none", "lab/x"], 2, "none: the run has not started, or it is another claim"),
        (["other", "{}", "lab/x"], 2, "is the folder of run 'math', not of 'other'"),
        (["math", "{}", "lab/x", "--only", "hf"], 2, "has no hf yet"),
        (["math", "{}", "lab/taken"], 2, "lab/taken/tandem-results.json"),
        (["math", "{}", "lab/broken"], 2, "is no manifest of results"),
        (["math"], 2, "FOLDER"),
    ],
)
def test_bad_input_is_named(
    environ: pytest.MonkeyPatch,
    storage: S3Server,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    storage.put(f"lab/taken/{MANIFEST}", b'{"run": "other", "files": {}}')
    storage.put(f"lab/broken/{MANIFEST}", b"[]")
    before = storage.keys("lab")
    try:
        found = main([each.format(folder) for each in arguments])
    except SystemExit as ended:  # argparse's
        found = int(str(ended.code))
    assert (found, text in capsys.readouterr().err) == (code, True)
    assert storage.keys("lab") == before


def test_an_endpoint_that_refuses_is_named(
    environ: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert main(["math", str(folder), "lab/x"]) == 1
    assert "s3://lab/x/tandem-results.json at http://127.0.0.1:1" in capsys.readouterr().err
    environ.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    assert main(["math", str(folder), "lab/x"]) == 2
    assert "AWS_ENDPOINT_URL=127.0.0.1:9000: not an address" in capsys.readouterr().err
