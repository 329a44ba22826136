"""Connect to Redis: with timeouts, and with errors that say what to do."""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from servicekit.errors import ConfigError, Unavailable
from servicekit.logs import get_logger

log = get_logger(__name__)
# Control messages only: an answer takes milliseconds.
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
SCHEMES = ("redis", "rediss", "unix")
# Variables that become options of the URL: files in PEM, read at every new connection.
TLS_OPTIONS = {
    "TANDEM_REDIS_CA": "ssl_ca_certs",
    "TANDEM_REDIS_CERT": "ssl_certfile",
    "TANDEM_REDIS_KEY": "ssl_keyfile",
}
_RETRY_S = 0.5
Kind = Literal["string", "set", "hash", "sorted set"]
# Commands with an empty or short answer that a key of another type refuses.
_PROBES: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "string": ("GET", ()),
    "set": ("SMEMBERS", ()),
    "hash": ("HGET", ("",)),
    "sorted set": ("ZRANGEBYSCORE", ("1", "0")),
}


class AccessRefused(Unavailable):
    """Redis does not allow this user the command. It may pass: rules can be changed and reloaded during a run."""


def connect(url: str, *, decode_responses: bool = True, wait_s: float = 0.0) -> redis.Redis:
    """Connect to a server that answers. Returns: a thread-safe client; replies are str with `decode_responses`.

    Args:
        wait_s: seconds for which to retry a server that does not answer; logged once.
    Raises: ConfigError: a wrong or missing password, a bad certificate, a missing right, or a malformed URL;
        Unavailable: the server cannot be reached, or is still loading its data.
    """
    deadline_s = time.monotonic() + wait_s
    logged = False
    while True:
        try:
            return _connect(url, decode_responses)
        except Unavailable as error:
            if time.monotonic() >= deadline_s:
                raise
            if not logged:
                log.error("waiting for Redis", error=str(error), seconds=wait_s)
            logged = True
        time.sleep(_RETRY_S)


def _connect(url: str, decode_responses: bool) -> redis.Redis:
    shown, has_password = redact(url).partition("?ssl_")[0], redact(url) != url
    check_scheme(url)
    _check_files(url)
    try:
        client = redis.Redis.from_url(
            url,
            decode_responses=decode_responses,
            encoding_errors="replace",  # text of others that is no UTF-8 must not fail halfway through an answer
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        )
        client.ping()
    except ValueError as error:
        raise _malformed(shown, error) from None
    except redis.RedisError as error:
        kind = Unavailable if _is_transient(error) else ConfigError
        raise kind(f"Redis at {shown} {_explain(error, has_password=has_password)}") from error
    return client


def with_tls_files(url: str, environ: Mapping[str, str]) -> str:
    """Add the files that TANDEM_REDIS_CA, TANDEM_REDIS_CERT and TANDEM_REDIS_KEY name to the URL.

    >>> with_tls_files("rediss://ann:pw@db:6379/0", {"TANDEM_REDIS_CA": "/tls/ca.crt"})
    'rediss://ann:pw@db:6379/0?ssl_ca_certs=%2Ftls%2Fca.crt'

    Raises: ConfigError: files for a URL without TLS, or a certificate without its key.
    """
    given = {option: environ[name] for name, option in TLS_OPTIONS.items() if environ.get(name)}
    parts = urlsplit(url)
    if not given or parts.scheme == "unix":
        return url
    if parts.scheme == "redis":
        raise ConfigError(f"TANDEM_REDIS_CA asks for TLS, but REDIS_URL {redact(url)} has none; write rediss://")
    if ("ssl_certfile" in given) != ("ssl_keyfile" in given):
        raise ConfigError("TANDEM_REDIS_CERT and TANDEM_REDIS_KEY are one certificate and its key; set both or none")
    options = given | dict(parse_qsl(parts.query))
    return urlunsplit(parts._replace(query=urlencode(options)))


@contextlib.contextmanager
def redis_errors(client: redis.Redis | None = None, kinds: Mapping[str, Kind] = MappingProxyType({})) -> Iterator[None]:
    """Turn errors of the Redis commands inside into Unavailable: outages, fail-overs and full memory may all pass.

    Args:
        kinds: what the keys of the commands hold; with `client`, a key that holds something else is named.
    Raises: AccessRefused, an Unavailable: the user lacks a right now. Registry() checks at the start that it has them.
    """
    try:
        yield
    except redis.exceptions.NoPermissionError as error:
        raise AccessRefused(
            f"Redis does not allow that ({error}); are user and password in REDIS_URL, and has the user the rules "
            "that `python -m servicekit.redis.acl` prints?"
        ) from error
    except redis.RedisError as error:
        wrong = _of_other_kind(client, kinds) if client is not None and "WRONGTYPE" in str(error) else []
        raise Unavailable(f"Redis failed: {'; '.join(wrong) or error}") from error


def _of_other_kind(client: redis.Redis, kinds: Mapping[str, Kind]) -> list[str]:
    """Describe the keys that hold something else than they should; as far as Redis answers."""
    found = []
    for key, kind in kinds.items():
        command, arguments = _PROBES[kind]
        try:
            client.execute_command(command, key, *arguments)
        except redis.ResponseError as error:
            if "WRONGTYPE" in str(error):
                found.append(f"the key {key} is no {kind}: another program has written it; remove it (redis-cli del)")
        except redis.RedisError:
            break
    return found


def redact(url: str) -> str:
    """Hide the password of a URL, for messages.

    >>> redact("redis://ann:secret@db:6379/0")
    'redis://ann:***@db:6379/0'
    >>> redact("unix:///run/redis.sock?db=1&password=secret")
    'unix:///run/redis.sock?db=1&password=***'
    """
    url = re.sub(r"(?<=[?&]password=)[^&]*", "***", url)
    # Greedy up to the last @ before the path: a password may hold an unescaped one.
    return re.sub(r"^([a-z]+://[^:@/]*):[^/]*@", r"\1:***@", url, flags=re.IGNORECASE)


def check_scheme(url: str) -> None:
    """Raise ConfigError unless it is a redis://, rediss:// or unix:// URL."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:  # brackets that do not match
        raise _malformed(redact(url), error) from None
    if scheme not in SCHEMES:
        raise ConfigError(
            f"Redis URL {redact(url)!r} has the scheme {scheme!r}; "
            "expected redis://host:port, rediss://host:port or unix:///path.sock"
        )


def _malformed(shown: str, error: ValueError) -> ConfigError:
    return ConfigError(
        f"Redis URL {shown} is malformed: {error}; expected redis://user:password@host:port, an IPv6 host in brackets: "
        "redis://[fd00::5]:6379"
    )


def _check_files(url: str) -> None:
    """Raise ConfigError for an unreadable TLS file; redis-py would name neither the file nor the variable."""
    options = dict(parse_qsl(urlsplit(url).query))
    for variable, option in TLS_OPTIONS.items():
        if option not in options:
            continue
        try:
            Path(options[option]).read_bytes()
        except OSError as error:
            raise ConfigError(f"{variable}={options[option]} cannot be read: {error.strerror}") from None


def _is_transient(error: redis.RedisError) -> bool:
    """Whether the same attempt may succeed later: an unreachable server may, a bad certificate may not."""
    if isinstance(error, redis.AuthenticationError) or "SSL" in str(error):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError)


def _explain(error: redis.RedisError, *, has_password: bool) -> str:
    text = str(error)
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthenticationWrongNumberOfArgsError):
        if not has_password:
            return f"wants a password ({text}); put it into REDIS_URL: redis://:PASSWORD@host:port"
        return f"refuses the user or the password ({text}); correct them in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError):
        if not has_password:
            return f"allows nothing without a password ({text}); put user and password into REDIS_URL"
        return f"does not allow this user what Tandem needs ({text}); `python -m servicekit.redis.acl` prints the rules"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return f"is still loading its data ({text}); try again in a moment"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"has a certificate that we do not trust ({text}); is TANDEM_REDIS_CA its authority?"
    if "SSL" in text or "violation of protocol" in text:
        return (
            f"refuses the TLS handshake ({text}); if it wants a certificate, set TANDEM_REDIS_CERT and TANDEM_REDIS_KEY"
        )
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"is unreachable ({text}); is the server running, and is REDIS_URL its address?"
    return f"answered with an error: {text}"
