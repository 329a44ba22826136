"""The Job that downloads models or data onto the claim `models`.

source            what it runs                     image
OWNER/NAME        `hf`, of a Hugging Face endpoint    the trainer's
s3://BUCKET/...   launcher/deploy/models/s3.py        the coordinator's
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from launcher.deploy import restricted
from servicekit.errors import ConfigError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_S3 = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*")
# Of the Secret for S3: key -> variable.
SECRET_KEYS = {"access-key": "AWS_ACCESS_KEY_ID", "secret-key": "AWS_SECRET_ACCESS_KEY"}
_LONGEST_NAME = 50


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """What to download.

    Attributes:
        source: `OWNER/NAME` of a Hugging Face endpoint, or `s3://BUCKET/PREFIX`.
        kind: `model` or `dataset`, of a repository.
        revision: branch, tag or commit of a repository.
        folder: below `/models`.
        image: the trainer's for a repository, the coordinator's for S3.
        claim: of the models.
        endpoint: "": the program's default.
        secret: Secret whose key `token` is the access token, or whose keys are SECRET_KEYS; "": none is needed.
        region: of S3; "": the default.
    """

    source: str
    kind: str
    revision: str
    folder: str
    namespace: str
    image: str
    claim: str
    endpoint: str
    secret: str
    region: str = ""

    @property
    def is_s3(self) -> bool:
        """Whether the source is S3-compatible storage."""
        return self.source.startswith(_S3)

    @property
    def name(self) -> str:
        """Name of the Job."""
        return f"fetch-{re.sub(r'[^a-z0-9]+', '-', self.folder.lower()).strip('-')[:_LONGEST_NAME].rstrip('-')}"


def fetch_job(request: FetchRequest) -> dict[str, Any]:
    """Make the manifest of the Job. Raises: ConfigError: the request is not one of a repository."""
    _check(request)
    variables = _s3_variables(request) if request.is_s3 else _hf_variables(request)
    # Not the label of a run's pods: their policies would close the way out.
    labels = {"app.kubernetes.io/name": "tandem-fetch", "app.kubernetes.io/component": "fetch"}
    amounts = {"cpu": "2", "memory": "4Gi"}
    container = restricted.CONTAINER | {
        "name": "fetch",
        "image": request.image,
        "command": _command(request),
        "env": variables,
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = restricted.POD | {
        "containers": [container],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": request.claim}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.name, "namespace": request.namespace, "labels": labels},
        "spec": {"backoffLimit": 6, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }


def _command(request: FetchRequest) -> list[str]:
    target = f"/models/{request.folder}"
    if request.is_s3:
        return ["python", "-m", "launcher.deploy.models.s3", request.source.removeprefix(_S3), target]
    command = ["hf", "download", request.source, "--local-dir", target]
    return [*command, "--repo-type", request.kind, "--revision", request.revision]


def _hf_variables(request: FetchRequest) -> list[dict[str, Any]]:
    # What is half downloaded stays beside the files, so that the next attempt continues; this is for locks only.
    found = {"HF_HOME": "/tmp/hf", "HF_HUB_DISABLE_TELEMETRY": "1"}
    found |= {"HF_ENDPOINT": request.endpoint} if request.endpoint else {}
    return [*_values(found), *_of_secret(request, {"token": "HF_TOKEN"})]


def _s3_variables(request: FetchRequest) -> list[dict[str, Any]]:
    found = {"AWS_ENDPOINT_URL": request.endpoint, "AWS_REGION": request.region}
    return [*_values({name: text for name, text in found.items() if text}), *_of_secret(request, SECRET_KEYS)]


def _values(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": text} for name, text in values.items()]


def _of_secret(request: FetchRequest, names: Mapping[str, str]) -> list[dict[str, Any]]:
    if not request.secret:
        return []
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": request.secret, "key": key}}}
        for key, name in names.items()
    ]


def _check(request: FetchRequest) -> None:
    if request.is_s3 and not _BUCKET.fullmatch(request.source.removeprefix(_S3).rstrip("/")):
        raise ConfigError(f"{request.source!r} is no place in S3: give s3://BUCKET/PREFIX")
    if not request.is_s3 and not _REPOSITORY.fullmatch(request.source):
        raise ConfigError(
            f"{request.source!r} is not a repository: give OWNER/NAME, e.g. Qwen/Qwen2.5-7B, or s3://BUCKET/PREFIX"
        )
    if not _FOLDER.fullmatch(request.folder):
        raise ConfigError(f"--to {request.folder!r} is not a folder below /models: letters, digits, - _ . and /")
    url = urlsplit(request.endpoint)
    if request.endpoint and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError(f"--endpoint {request.endpoint!r} is not an address: give https://HOST")
