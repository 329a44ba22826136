"""The registry's records: of running services, and of why others have ended."""

import dataclasses
import json
import time

from servicekit.errors import ConfigError
from servicekit.versions import release

# Key of the value that holds the URL of the run's web page.
PAGE_URL = "page_url"
# The role that conducts the run, and the name of its only process.
COORDINATOR = "coordinator"
ROLES = (COORDINATOR, "trainer", "rollout", "rollout-worker")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceRecord:
    """One running service.

    Attributes:
        role: "trainer", "rollout", "rollout-worker" (a further host of a rollout's engine) or "coordinator".
        name: unique within the role ("rollout-0").
        address: gRPC `host:port`.
        metrics_address: `host:port` of /metrics; "" for none.
        worker_id: unique per process start.
        release: of the software that it runs.
    """

    role: str
    name: str
    address: str
    metrics_address: str = ""
    worker_id: str
    release: str = dataclasses.field(default_factory=release)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a service ended. unix_s: when."""

    role: str
    name: str
    reason: str
    unix_s: float

    def __str__(self) -> str:
        return f"{self.name} ended {max(0.0, time.time() - self.unix_s):.0f} s ago: {self.reason}"


Records = list[ServiceRecord]
Failures = list[Failure]


def read_record(text: str) -> ServiceRecord:
    """Read a record from its JSON. Raises: ConfigError: it is not one of ours."""
    try:
        fields = {"release": "of a release that does not say", **json.loads(text)}
        # A newer release may have more fields: ignore them here; its field `release` is compared elsewhere.
        return ServiceRecord(**{field.name: fields[field.name] for field in dataclasses.fields(ServiceRecord)})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"a service record in Redis cannot be read ({error}): {text[:200]}; does another program use this run id?"
        ) from error
