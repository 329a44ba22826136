"""The registry of a run's services: records in Redis that exist for as long as their owner renews them.

    tandem:<run_id>:service:<role>:<name>   JSON of a ServiceRecord, with a time to live (the lease)
    tandem:<run_id>:names:<role>            names that were ever announced; a name without a record is lost
    tandem:<run_id>:value:<key>             small values that processes of a run share
    tandem:<run_id>:value:settings:<digest> the settings of that digest (AgreedSettings)
    tandem:<run_id>:failure:<role>:<name>   JSON of a Failure: why the service of that name ended last time
    tandem:<run_id>:failures                "<role>:<name>" of those

What a run leaves there expires within a week of its last renewal.

Redis is the only clock: a record is live as long as Redis has it. A live record belongs to its worker_id; no other
process may replace it.
"""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import redis

from servicekit.addresses import split_address
from servicekit.errors import (
    Aborted,
    AlreadyExists,
    ConfigError,
    ConfigurationSkew,
    DeadlineExceeded,
    ReleaseSkew,
    TandemError,
    Unavailable,
)
from servicekit.logs import get_logger
from servicekit.redis import client as redis_client
from servicekit.redis.client import AccessRefused, redis_errors
from servicekit.redis.lease import Lease
from servicekit.redis.records import (
    CLAIM,
    ROLES,
    WITHDRAW,
    AgreedSettings,
    Failure,
    Failures,
    Records,
    ServiceRecord,
    read_failure,
    read_record,
)

T = TypeVar("T")

log = get_logger(__name__)
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.1
_CONNECT_TIMEOUT_S, _RIGHTS_RETRY_S = 1.0, 0.5
# Longer than any run waits for its Redis or its processes; renewed with each lease.
_KEPT_S = 7 * 86_400
SETTINGS_ADVICE = (
    "restart the services that have the old one, so that all of the run read the same file, or give the values back"
)
_CLOSED = "the registry was closed while waiting"


def listens(address: str) -> bool | None:
    """Whether something listens at host:port, be it frozen; None: the host does not say. Blocking."""
    try:
        socket.create_connection(split_address(address), timeout=_CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        return None
    return True


class Registry:
    """The registry of one run. Thread-safe; methods block on Redis, so call them from a thread under asyncio.

    Args:
        settings: those on which the run's services must agree, which our record shall carry; None: it says nothing.
        wait_s: seconds that the constructor waits for a Redis that does not answer, or refuses a right that we need.
    Raises (constructor): ConfigError: Redis refuses us; Unavailable: it does not answer.
    """

    def __init__(
        self, redis_url: str, run_id: str, *, wait_s: float = 0.0, settings: AgreedSettings | None = None
    ) -> None:
        self._settings = settings
        deadline_s = time.monotonic() + wait_s
        self._redis: redis.Redis = redis_client.connect(redis_url, wait_s=wait_s)
        self._prefix = f"tandem:{run_id}"
        self._failures_key = f"{self._prefix}:failures"
        self._claim = self._redis.register_script(CLAIM)
        self._remove = self._redis.register_script(WITHDRAW)
        self._record: ServiceRecord | None = None
        self._lease: Lease | None = None
        self._values: set[str] = set()  # keys of values that we keep alive with our record
        self._warned: set[tuple[str, str]] = set()  # keys and texts that were warned about
        self._closed = threading.Event()
        self._check_rights(deadline_s)

    def _check_rights(self, deadline_s: float) -> None:
        """Raise ConfigError if Redis refuses a registry's commands until the deadline; Unavailable if it fails."""
        logged = False
        while True:
            try:
                with redis_errors():  # runs a script with reads and changes nothing: no service has this name
                    self._remove(keys=[self._service_key("", ""), f"{self._prefix}:names:"], args=["", ""])
                return
            except AccessRefused as error:
                if time.monotonic() >= deadline_s:
                    raise ConfigError(str(error)) from error
                if not logged:
                    log.error("waiting for rights in Redis", error=str(error))
                logged = True
            time.sleep(_RIGHTS_RETRY_S)

    def announce(self, record: ServiceRecord, ttl_s: float, on_lost: Callable[[str], None] | None = None) -> None:
        """Publish our record and keep it alive from a daemon thread until withdraw() or close().

        Announcing again (a new address, say) replaces our own record.

        Args:
            ttl_s: seconds that the record outlives us; renewed every third of it.
            on_lost: called once, from the thread, with the reason, if another worker has taken the name while
                Redis had lost our record.
        Raises: AlreadyExists: a live record of another worker has this name; ReleaseSkew: a service of the run is of
            another release; ConfigurationSkew: one has read other settings; Unavailable: Redis does not answer;
            Aborted: close() was called meanwhile.
        """
        if ttl_s <= 0:
            raise ValueError(f"ttl_s must be positive, got {ttl_s}")
        if self._record is not None and self._keys(self._record) != self._keys(record):
            raise ValueError(f"this registry has announced {self._record.name!r} already; withdraw it first")
        if self._lease is not None:
            self._lease.stop()
        with self._unless_closed():
            if self._settings is not None:
                record = dataclasses.replace(record, settings=self._settings.digest)
                self.set_value(f"settings:{self._settings.digest}", self._settings.to_json())
            self._put(record, ttl_s)
            self._record = record
            self._refuse_other_releases(record)
            self._refuse_other_settings(record)
            self._forget_failures(record.role, record.name)
        self._lease = Lease(f"{record.role}/{record.name}", ttl_s, lambda: self._put(record, ttl_s), on_lost)
        self._lease.start()
        if self._closed.is_set():  # close() may have run before the record and its lease were set
            self.withdraw()
            raise Aborted(_CLOSED)

    def _refuse_other_releases(self, record: ServiceRecord) -> None:
        """Compare releases after our record is published: of two that start together, at least one sees the other."""
        for role in ROLES:
            for other in self.list(role):
                if other.release == record.release or self._keys(other) == self._keys(record):
                    continue
                self.withdraw()
                raise ReleaseSkew(
                    f"{record.name} is {record.release}, and {other.name} at {other.address}, of the same run, is "
                    f"{other.release}: use images of one release"
                )

    def _refuse_other_settings(self, record: ServiceRecord) -> None:
        """Compare settings, as releases are; services that were killed, and are still listed, do not count."""
        for role in ROLES:
            for other in self.list(role):
                same = other.settings in ("", record.settings) or self._keys(other) == self._keys(record)
                if not record.settings or same or listens(other.address) is False:
                    continue
                differences = self.explain_settings(other.settings)
                self.withdraw()
                raise ConfigurationSkew(
                    f"{record.name} has read another configuration than {other.name} at {other.address}, of the same "
                    f"run: {differences}: {SETTINGS_ADVICE}"
                )

    @property
    def settings_digest(self) -> str:
        """Digest of the settings that we agree to; "" if we say nothing."""
        return "" if self._settings is None else self._settings.digest

    def explain_settings(self, digest: str) -> str:
        """Say in which settings a service differs from us.

        Args:
            digest: of its settings.
        """
        try:
            theirs = self.get_value(f"settings:{digest}")
            if self._settings is not None and theirs is not None:
                return self._settings.differences(theirs)
        except (Unavailable, ValueError, RecursionError) as error:
            log.warning("settings of another service not read", error=str(error))
        return f"the digest of its settings is {digest[:12]}, here it is {self.settings_digest[:12]}"

    def withdraw(self) -> None:
        """Remove our own record, if there is one; a record of another worker stays."""
        if self._lease is not None:
            self._lease.stop()
        record, self._lease, self._record = self._record, None, None
        if record is None:
            return
        with self._errors(record):
            self._remove(keys=self._keys(record), args=[record.name, record.worker_id])

    def remove_refusing(self, role: str, name: str) -> bool:
        """Remove a record whose address refuses connections: its owner was killed; do not wait for its lease.

        A frozen process, or one on an unreachable host, does not refuse; it is lost only when its lease runs out.

        Returns: whether there was such a record.
        """
        for record in self.list(role):
            if record.name == name and listens(record.address) is False:
                with self._errors(record):
                    return bool(self._remove(keys=self._keys(record), args=[record.name, record.worker_id]))
        return False

    def close(self) -> None:
        """Withdraw, end waits in other threads with Aborted, and disconnect; also when Redis is unreachable."""
        self._closed.set()
        try:
            self.withdraw()
        except Unavailable as error:
            log.warning("record not withdrawn, its lease will expire", error=str(error))
        self._redis.close()

    def names(self, role: str) -> set[str]:
        """Return the names that were announced and not withdrawn; one without a record is lost."""
        key = f"{self._prefix}:names:{role}"
        with redis_errors(self._redis, {key: "set"}):
            found: Any = self._redis.smembers(key)
        return set(found)

    def list(self, role: str) -> Records:
        """Return the live records of a role, sorted by name; those that cannot be read are warned of, and left out."""
        names = sorted(self.names(role))
        with redis_errors():
            texts: Any = self._redis.mget([self._service_key(role, name) for name in names]) if names else []
        found: Records = []
        for name, text in zip(names, texts, strict=True):
            with self._warning_of(self._service_key(role, name), text):
                if text is not None:
                    record = read_record(text)
                    if (record.role, record.name) != (role, name):
                        raise ConfigError(f"it is the record of {record.role} {record.name!r:.60}")
                    found.append(record)
        return found

    @contextlib.contextmanager
    def _warning_of(self, key: str, text: str | None) -> Iterator[None]:
        """Warn of a record that cannot be read, once: one that another program has written must not end a run."""
        try:
            yield
        except ConfigError as error:
            if (key, str(text)) not in self._warned:
                self._warned.add((key, str(text)))
                log.warning("record in Redis left out: remove it, or write it anew", key=key, error=str(error))

    def wait_for(self, role: str, names: Sequence[str] | int, timeout_s: float) -> Records:
        """Wait until services are announced.

        Args:
            names: the names to wait for, or how many of the role.
        Returns: their records in the order of `names`; for a number, all of the role, sorted by name.
        Raises: DeadlineExceeded: naming those that are missing; Aborted: close() was called meanwhile.
        """
        if isinstance(names, str):
            raise ValueError(f"names must be a list of names or a number, got the string {names!r}")

        def look() -> Records | None:
            found = {record.name: record for record in self.list(role)}
            if isinstance(names, int):
                return list(found.values()) if len(found) >= names else None
            return [found[name] for name in names] if all(name in found for name in names) else None

        def missing() -> str:
            found = [record.name for record in self.list(role)]
            there = f"there is {', '.join(found) or 'none'}"
            ended = [failure for failure in self.failures() if failure.role == role and failure.name not in found]
            there += "".join(f"; {failure}" for failure in ended)
            if isinstance(names, int):
                return f"{names - len(found)} of {names} {role} services; {there}"
            return f"{role} {', '.join(name for name in names if name not in found)}; {there}"

        return self._poll(look, missing, timeout_s)

    def set_value(self, key: str, value: str, ttl_s: float | None = None) -> None:
        """Publish a small value of the run; replaces an older one.

        Args:
            ttl_s: how long it stays; None: for as long as our record is renewed, and a week.
        """
        kept_ms = max(1, round(1000 * (_KEPT_S if ttl_s is None else ttl_s)))
        with redis_errors():  # of whatever kind it was
            self._redis.set(self._value_key(key), value, px=kept_ms)
        if ttl_s is None:
            self._values.add(self._value_key(key))

    def get_value(self, key: str) -> str | None:
        """Return a value of the run; None if it is not set."""
        with redis_errors(self._redis, {self._value_key(key): "string"}):
            found: Any = self._redis.get(self._value_key(key))
        return None if found is None else str(found)

    def wait_value(self, key: str, timeout_s: float) -> str:
        """Wait for a value. Raises: DeadlineExceeded: it was not set; Aborted: close() was called meanwhile."""
        return self._poll(lambda: self.get_value(key), lambda: f"value {key!r}", timeout_s)

    def report_failure(self, role: str, name: str, reason: str) -> None:
        """Record why a service, or its rank `<service>-rank-<number>`, ends; announce() of the service removes it."""
        failure = Failure(role=role, name=name, reason=reason, unix_s=time.time())
        with redis_errors(self._redis, {self._failures_key: "set"}):
            self._redis.set(self._failure_key(role, name), json.dumps(dataclasses.asdict(failure)), ex=_KEPT_S)
            self._redis.sadd(self._failures_key, f"{role}:{name}")
            self._redis.expire(self._failures_key, _KEPT_S)

    def failures(self) -> Failures:
        """Return the failures of all services that have not been announced again, sorted by role and name."""
        with redis_errors(self._redis, {self._failures_key: "set"}):
            members: Any = self._redis.smembers(self._failures_key)
            keys = [self._failure_key(*member.split(":", 1)) for member in sorted(members) if ":" in member]
            texts: Any = self._redis.mget(keys) if keys else []
        found: Failures = []
        for key, text in zip(keys, texts, strict=True):
            with self._warning_of(key, text):
                if text is not None:
                    found.append(read_failure(text))
        return found

    def _forget_failures(self, role: str, name: str) -> None:
        for failure in self.failures():
            if failure.role == role and (failure.name == name or failure.name.startswith(f"{name}-rank-")):
                with redis_errors(self._redis, {self._failures_key: "set"}):
                    self._redis.delete(self._failure_key(role, failure.name))
                    self._redis.srem(self._failures_key, f"{role}:{failure.name}")

    def _poll(self, look: Callable[[], T | None], missing: Callable[[], str], timeout_s: float) -> T:
        """Call `look` at growing intervals until it returns something."""
        deadline_s = time.monotonic() + timeout_s
        interval_s = _FIRST_POLL_S
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                with self._unless_closed():
                    found = look()
                if found is not None:
                    return found
                if left_s <= 0:
                    raise DeadlineExceeded(f"waited {timeout_s:g} s for {missing()}")
            except Unavailable as error:  # Redis may come back before the deadline
                if left_s <= 0:
                    raise DeadlineExceeded(f"waited {timeout_s:g} s for Redis: {error}") from error
            if self._closed.wait(min(interval_s, max(left_s, 0.0))):
                raise Aborted(_CLOSED)
            interval_s = min(interval_s * 1.5, _LONGEST_POLL_S)

    @contextlib.contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """Turn any error of the call inside into Aborted if close() has disconnected it: redis-py has none for that."""
        try:
            yield
        except (TandemError, OSError, ValueError, TypeError, AttributeError) as error:
            if self._closed.is_set():
                raise Aborted(_CLOSED) from error
            raise

    def _put(self, record: ServiceRecord, ttl_s: float) -> None:
        text = json.dumps(dataclasses.asdict(record))
        arguments: tuple[str | int, ...] = (record.name, record.worker_id, text, max(1, round(ttl_s * 1000)), _KEPT_S)
        with self._errors(record):
            held_by: Any = self._claim(keys=[*self._keys(record), *sorted(self._values)], args=arguments)
        if held_by == "":
            log.warning("our record in Redis could not be read, and was written anew", key=self._keys(record)[0])
        elif held_by is not None:
            other = json.loads(held_by)  # of the fields that the script has checked
            raise AlreadyExists(
                f"{record.role} {record.name!r} is held by worker {other['worker_id']!r} at {other['address']}; "
                "stop it, or wait until its lease has expired"
            )

    def _errors(self, record: ServiceRecord) -> contextlib.AbstractContextManager[None]:
        record_key, names_key = self._keys(record)
        return redis_errors(self._redis, {record_key: "string", names_key: "set"})

    def _keys(self, record: ServiceRecord) -> tuple[str, str]:
        return self._service_key(record.role, record.name), f"{self._prefix}:names:{record.role}"

    def _service_key(self, role: str, name: str) -> str:
        return f"{self._prefix}:service:{role}:{name}"

    def _failure_key(self, role: str, name: str) -> str:
        return f"{self._prefix}:failure:{role}:{name}"

    def _value_key(self, key: str) -> str:
        return f"{self._prefix}:value:{key}"
