"""What the Jobs that move files in and out of a cluster have in common: the pod, and S3's addresses and keys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from launcher.deploy import restricted
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG

S3 = "s3://"
# Keys of the Secret for S3, and the variable of each.
SECRET_KEYS = {"access-key": "AWS_ACCESS_KEY_ID", "secret-key": "AWS_SECRET_ACCESS_KEY"}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*")
_LONGEST_NAME = 50


@dataclass(frozen=True, kw_only=True)
class FileJob:
    """A Job that moves files.

    Attributes:
        what: the Job's component, and its container's name: `fetch`, `results`.
        variables: of the container.
        volume: name of the claim's volume.
        mount: where it is.
        near: labels of pods on whose node it prefers to run, because a claim may be of one node.
    """

    what: str
    name: str
    namespace: str
    image: str
    command: list[str]
    variables: list[dict[str, Any]]
    claim: str
    volume: str
    mount: str
    read_only: bool = False
    near: Mapping[str, str] = field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        """Return the object. An attempt that fails is repeated, but not after a wrong address, key or path."""
        # Not the label of a run's pods: their policies would close the way out.
        labels = {"app.kubernetes.io/name": f"tandem-{self.what}", "app.kubernetes.io/component": self.what}
        amounts = {"cpu": "2", "memory": "4Gi"}
        read_only = {"readOnly": True} if self.read_only else {}
        container = restricted.CONTAINER | {
            "name": self.what,
            "image": self.image,
            "command": self.command,
            "env": self.variables,
            "resources": {"requests": amounts, "limits": amounts},
            "volumeMounts": [
                {"name": self.volume, "mountPath": self.mount, **read_only},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
        pod = restricted.POD | {
            "containers": [container],
            "volumes": [
                {"name": self.volume, "persistentVolumeClaim": {"claimName": self.claim, **read_only}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
        }
        pod |= {"affinity": restricted.near(self.near)} if self.near else {}
        refused = {"containerName": self.what, "operator": "In", "values": [EXIT_BAD_CONFIG]}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": labels},
            "spec": {
                "backoffLimit": 6,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": refused}]},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }


def job_name(what: str, subject: str) -> str:
    """Name a Job, as the API takes it.

    >>> job_name("fetch", "lab/Qwen2.5_7B")
    'fetch-lab-qwen2-5-7b'
    """
    return f"{what}-{re.sub(r'[^a-z0-9]+', '-', subject.lower()).strip('-')[:_LONGEST_NAME].rstrip('-')}"


def s3_place(option: str) -> str:
    """Return BUCKET/PREFIX of s3://BUCKET/PREFIX. Raises: ConfigError: it is none."""
    place = option.removeprefix(S3).rstrip("/")
    if not option.startswith(S3) or not _BUCKET.fullmatch(place):
        raise ConfigError(f"{option!r} is no place in S3: give s3://BUCKET/PREFIX")
    return place


def s3_variables(endpoint: str, region: str, secret: str) -> list[dict[str, Any]]:
    """Return the variables of a container that reaches S3; "": the default, or no key. Raises: ConfigError."""
    check_endpoint(endpoint)
    found = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": region}
    return [*values({name: text for name, text in found.items() if text}), *of_secret(secret, SECRET_KEYS)]


def values(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return variables of a container."""
    return [{"name": name, "value": text} for name, text in variables.items()]


def of_secret(secret: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return variables that are keys of a Secret. secret: "": none."""
    if not secret:
        return []
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key, name in names.items()]


def check_endpoint(endpoint: str) -> None:
    """Check an address; "" is the program's default. Raises: ConfigError."""
    url = urlsplit(endpoint)
    if endpoint and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError(f"--endpoint {endpoint!r} is not an address: give https://HOST")
