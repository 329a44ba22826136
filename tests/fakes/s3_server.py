"""S3-compatible storage for tests: moto's server, a real server in memory, in a process of its own on loopback."""

import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.kit.waiting import until

START_S = 60.0
REQUEST_S = 30.0
# Any user; the server routes by the service in it, and looks at the rest only once `require_signatures` was called.
_IAM = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/iam/aws4_request, SignedHeaders=, Signature="
}
_MAY_ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'


class S3Server:
    """A running server. Requests of its own are those of nobody, so made before `require_signatures`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = httpx.Client(base_url=address, timeout=REQUEST_S)

    def make_bucket(self, name: str) -> None:
        self._client.put(f"/{name}", headers={"x-amz-acl": "public-read-write"}).raise_for_status()

    def put(self, key: str, body: bytes) -> None:
        """Store an object, BUCKET/KEY."""
        self._client.put(f"/{key}", content=body).raise_for_status()

    def keys(self, bucket: str) -> list[str]:
        """The keys of a bucket."""
        answer = self._client.get(f"/{bucket}", params={"list-type": "2"}).raise_for_status()
        return [str(each.text) for each in ET.fromstring(answer.text).iter() if each.tag.endswith("}Key")]

    def get(self, key: str) -> bytes:
        return self._client.get(f"/{key}").raise_for_status().content

    def delete(self, key: str) -> None:
        self._client.delete(f"/{key}").raise_for_status()

    def require_signatures(self) -> tuple[str, str]:
        """Check signatures and rights from now on. Returns: key and secret of a user who may do everything."""
        self._iam(Action="CreateUser", UserName="tandem")
        self._iam(Action="PutUserPolicy", UserName="tandem", PolicyName="all", PolicyDocument=_MAY_ALL)
        made = ET.fromstring(self._iam(Action="CreateAccessKey", UserName="tandem"))
        found = {each.tag.rpartition("}")[2]: str(each.text) for each in made.iter()}
        self._client.post("/moto-api/reset-auth", content=b"0").raise_for_status()
        return found["AccessKeyId"], found["SecretAccessKey"]

    def _iam(self, **form: str) -> str:
        return self._client.post("/", data={"Version": "2010-05-08", **form}, headers=_IAM).raise_for_status().text

    def close(self) -> None:
        self._client.close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server, with nothing in it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(f"http://127.0.0.1:{port}")
    try:
        until(lambda: _listens(port) or process.poll() is not None, START_S, "moto's server listening")
        assert process.poll() is None, "moto's server ended: is it installed? `make venv`"
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
