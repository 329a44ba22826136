"""The registry's records: of running services, and of why others have ended."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from servicekit.addresses import split_address
from servicekit.errors import ConfigError
from servicekit.versions import release

# Key of the value that holds the URL of the run's web page.
PAGE_URL = "page_url"
# The role that conducts the run, and the name of its only process.
COORDINATOR = "coordinator"
# Differences of settings that a message names.
_MOST_NAMED = 8
ROLES = (COORDINATOR, "trainer", "rollout", "rollout-worker")

# The worker whose record a text is; nil: it is no record.
_WORKER_OF = """
local function worker_of(text)
  local read, record = pcall(cjson.decode, text)
  if not read or type(record) ~= 'table' then return nil end
  for _, field in ipairs({'role', 'name', 'address', 'worker_id'}) do
    if type(record[field]) ~= 'string' then return nil end
  end
  return record['worker_id']
end
"""

WITHDRAW = f"""{_WORKER_OF}
local current = redis.call('GET', KEYS[1])
if current and worker_of(current) == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[1])
  return 1
end
return 0
"""

# Returns the record of the worker that holds the name, or nil when it is ours now; '' when something else was there,
# which is replaced. Keys from the second on, values that we have published among them, are kept for ARGV[5] seconds.
CLAIM = f"""{_WORKER_OF}
local current = redis.call('GET', KEYS[1])
local holder = current and worker_of(current)
if holder and holder ~= ARGV[2] then return current end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[5]) end
if current and not holder then return '' end
return nil
"""


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
        settings: digest of the settings on which services of a run must agree; "": it does not say.
    """

    role: str
    name: str
    address: str
    metrics_address: str = ""
    worker_id: str
    release: str = dataclasses.field(default_factory=release)
    settings: str = ""


@dataclasses.dataclass(frozen=True)
class AgreedSettings:
    """The settings on which the services of a run must agree, as texts by key."""

    texts: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all of them."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the texts as others read them."""
        return json.dumps(dict(self.texts), sort_keys=True)

    def differences(self, theirs: str) -> str:
        """List what differs from another service's.

        Args:
            theirs: what its `to_json` has returned.
        Raises: ValueError: that is not JSON of settings.

        >>> ours = AgreedSettings({"grpo.temperature": "1.0", "run.seed": "0"})
        >>> ours.differences('{"grpo.temperature": "0.7", "run.seed": "0"}')
        'grpo.temperature: 1.0 here, 0.7 there'
        """
        others = json.loads(theirs)
        if not isinstance(others, dict):
            raise ValueError(f"expected an object, got {type(others).__name__}")
        keys = [key for key in sorted({*self.texts, *others}) if self.texts.get(key) != others.get(key)]
        named = [f"{key}: {self.texts.get(key, 'not set')} here, {others.get(key, 'not set')} there" for key in keys]
        more = len(named) - _MOST_NAMED
        return "; ".join(named[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


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
    defaults = {"metrics_address": "", "release": "of a release that does not say", "settings": ""}
    # A newer release may have more fields: they are ignored here; its field `release` is compared elsewhere.
    record: ServiceRecord = _read(ServiceRecord, text, defaults)
    try:
        for address in (record.address, record.metrics_address or record.address):
            split_address(address)
    except ValueError as error:
        raise _unreadable(text, error) from None
    if not (record.name and record.worker_id):
        raise _unreadable(text, "it has no name or no worker_id")
    return record


def read_failure(text: str) -> Failure:
    """Read why a service ended from its JSON. Raises: ConfigError: it is not one of ours."""
    failure: Failure = _read(Failure, text, {})
    return failure


def _read(kind: type[Any], text: str, defaults: Mapping[str, str]) -> Any:
    """Make a dataclass whose fields are texts and numbers of its JSON, each of the type that it has."""
    try:
        given = {**defaults, **json.loads(text)}
        for field in dataclasses.fields(kind):
            wanted = (int, float) if field.type in (float, "float") else str
            if isinstance(given[field.name], bool) or not isinstance(given[field.name], wanted):
                raise TypeError(f"{field.name} is {given[field.name]!r:.60}")
        return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)})
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(text, error) from error
    except KeyError as error:
        raise _unreadable(text, f"it has no {error.args[0]}") from error


def _unreadable(text: str, why: object) -> ConfigError:
    return ConfigError(f"it cannot be read ({why}): {text[:200]!r}; does another program use this run id?")
