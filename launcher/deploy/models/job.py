"""The Job that downloads models or data onto the claim `models`.

source            what it runs                     image
OWNER/NAME        `hf`, of a Hugging Face endpoint    the trainer's
s3://BUCKET/...   launcher/deploy/models/s3.py        the coordinator's
"""

import re
from dataclasses import dataclass
from typing import Any

from launcher.deploy.transfer import (
    S3,
    FileJob,
    check_endpoint,
    job_name,
    of_secret,
    s3_place,
    s3_variables,
    values,
)
from servicekit.errors import ConfigError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_MODELS = "/models"


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
        secret: Secret whose key `token` is the access token, or whose keys are those of S3; "": none is needed.
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
        return self.source.startswith(S3)

    @property
    def name(self) -> str:
        """Name of the Job."""
        return job_name("fetch", self.folder)


def fetch_job(request: FetchRequest) -> dict[str, Any]:
    """Make the manifest of the Job. Raises: ConfigError: the request is not one of a repository."""
    _check(request)
    return FileJob(
        what="fetch",
        name=request.name,
        namespace=request.namespace,
        image=request.image,
        command=_command(request),
        variables=s3_variables(request.endpoint, request.region, request.secret)
        if request.is_s3
        else _hf_variables(request),
        claim=request.claim,
        volume="models",
        mount=_MODELS,
    ).manifest()


def _command(request: FetchRequest) -> list[str]:
    target = f"{_MODELS}/{request.folder}"
    if request.is_s3:
        return ["python", "-m", "launcher.deploy.models.s3", s3_place(request.source), target]
    command = ["hf", "download", request.source, "--local-dir", target]
    return [*command, "--repo-type", request.kind, "--revision", request.revision]


def _hf_variables(request: FetchRequest) -> list[dict[str, Any]]:
    # What is half downloaded stays next to the files, so that the next attempt continues; this is for locks only.
    found = {"HF_HOME": "/tmp/hf", "HF_HUB_DISABLE_TELEMETRY": "1"}
    found |= {"HF_ENDPOINT": request.endpoint} if request.endpoint else {}
    return [*values(found), *of_secret(request.secret, {"token": "HF_TOKEN"})]


def _check(request: FetchRequest) -> None:
    if not request.is_s3 and not _REPOSITORY.fullmatch(request.source):
        raise ConfigError(
            f"{request.source!r} is not a repository: give OWNER/NAME, e.g. Qwen/Qwen2.5-7B, or s3://BUCKET/PREFIX"
        )
    if not _FOLDER.fullmatch(request.folder):
        raise ConfigError(f"--to {request.folder!r} is not a folder below /models: letters, digits, - _ . and /")
    check_endpoint(request.endpoint)
