"""`tandem deploy fetch`: the Job is admitted, and its command, the real `hf`, downloads from an endpoint of ours."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.s3_server import S3Server
from tests.integration.launcher.deploy.conftest import Deploy
from tests.integration.launcher.deploy.jobs import admit, run_as_pod
from tests.integration.launcher.deploy.test_live import apply_file

pytestmark = pytest.mark.integration
FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": os.urandom(300_000)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
IMAGE = "registry.example.com/lab/tandem/trainer:0.2.0"


class _Endpoint(BaseHTTPRequestHandler):
    """The part of a Hugging Face endpoint that a download asks: one model, for who has the token."""

    protocol_version = "HTTP/1.1"
    token = "hf_secret"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self._send(401, b'{"error": "Invalid credentials"}', {})
        elif re.fullmatch(r"/api/models/lab/tiny/revision/\w+", path):
            names = [{"rfilename": name} for name in FILES]
            info = {"id": "lab/tiny", "modelId": "lab/tiny", "sha": COMMIT, "siblings": names, "private": False}
            self._send(200, json.dumps(info | {"tags": [], "downloads": 0, "likes": 0}).encode(), {})
        elif path == f"/api/models/lab/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in FILES.items()
            ]
            self._send(200, json.dumps(tree).encode(), {})
        elif (match := re.fullmatch(r"/lab/tiny/resolve/\w+/(.+)", path)) and match[1] in FILES:
            body = FILES[match[1]]
            digest = hashlib.sha256(body).hexdigest()
            self._send(200, body, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of an endpoint with the model lab/tiny."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_job_downloads_with_the_token_of_a_secret(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path, endpoint: str
) -> None:
    enforced = {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": enforced})
    more = ["--endpoint", endpoint, "--secret", "hf"]
    done = deploy("fetch", "lab/tiny", "-n", "team", "--image", IMAGE, *more)
    assert done.code == 0, done.text
    assert "kubectl apply -f fetch-tiny.yaml" in done.text
    job = yaml.safe_load(Path("fetch-tiny.yaml").read_text())
    apply_file(Path("fetch-tiny.yaml"))
    assert cluster.names("Job") == ["fetch-tiny"]
    admit(cluster, job)
    models = tmp_path / "volume"
    refused = run_as_pod(job, {"/models": models}, HF_TOKEN="wrong")
    assert refused.returncode != 0
    fetched = run_as_pod(job, {"/models": models}, HF_TOKEN=_Endpoint.token)
    assert fetched.returncode == 0, fetched.stderr
    assert {name: (models / "tiny" / name).read_bytes() for name in FILES} == FILES


@pytest.fixture
def stored(storage: S3Server) -> S3Server:
    """Storage with FILES in lab/models/tiny."""
    storage.make_bucket("lab")
    for name, body in FILES.items():
        storage.put(f"lab/models/tiny/{name}", body)
    return storage


def job_of(deploy: Deploy, stored: S3Server) -> dict[str, Any]:
    """The Job that copies them, as the API server has taken it."""
    image = "registry.example.com/lab/tandem/coordinator:0.2.0"
    more = ["--endpoint", stored.address, "--region", "us-east-1", "--secret", "s3"]
    done = deploy("fetch", "s3://lab/models/tiny", "-n", "team", "--image", image, *more)
    assert done.code == 0, done.text
    apply_file(Path("fetch-tiny.yaml"))
    job: dict[str, Any] = yaml.safe_load(Path("fetch-tiny.yaml").read_text())
    return job


def test_the_job_copies_from_s3_compatible_storage(
    deploy: Deploy, cluster: FakeCluster, tmp_path: Path, stored: S3Server
) -> None:
    job, models = job_of(deploy, stored), tmp_path / "volume"
    key, secret = stored.require_signatures()
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    fetched = run_as_pod(job, {"/models": models}, **keys)
    assert fetched.returncode == 0, fetched.stderr
    assert {name: (models / "tiny" / name).read_bytes() for name in FILES} == FILES
    (models / "tiny" / "config.json").unlink()
    again = run_as_pod(job, {"/models": models}, **keys)
    assert "1 files copied" in again.stdout
    wrong = run_as_pod(job, {"/models": models}, **keys | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert (wrong.returncode, "SignatureDoesNotMatch" in wrong.stderr) == (2, True)
    job["spec"]["template"]["spec"]["containers"][0]["command"][3] = "lab/models/large"
    missing = run_as_pod(job, {"/models": models}, **keys)
    assert (missing.returncode, "s3://lab/models/large" in missing.stderr) == (2, True)
    half = run_as_pod(job, {"/models": models}, AWS_ACCESS_KEY_ID=key)
    assert (half.returncode, "one is set without the other" in half.stderr) == (2, True)


def test_empty_objects_that_stand_for_folders_are_no_files(deploy: Deploy, tmp_path: Path, stored: S3Server) -> None:
    """As consoles of storages make them."""
    for name in ("", "sub/"):
        stored.put(f"lab/models/tiny/{name}", b"")
    stored.put("lab/models/tiny/sub/empty.txt", b"")
    fetched = run_as_pod(job_of(deploy, stored), {"/models": tmp_path / "volume"})
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / "volume/tiny/sub/empty.txt").read_bytes() == b""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny"], "is not a repository"),
        (["s3://B/x"], "is no place in S3"),
        (["lab/tiny", "--to", "../x"], "is not a folder below /models"),
        (["lab/tiny", "--endpoint", "hub"], "is not an address"),
        (["lab/tiny", "--image", "tandem/trainer"], "begins with no registry"),
    ],
)
def test_what_cannot_be_fetched_is_named(deploy: Deploy, arguments: list[str], expected: str) -> None:
    done = deploy("fetch", "-n", "team", "--image", IMAGE, *arguments)
    assert done.code == 2, done.text
    assert expected in done.text
