"""One way to connect to Redis: with timeouts, and with errors that a person can act on."""

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from servicekit.errors import ConfigError, Unavailable

# Control messages only: an answer takes milliseconds.
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
SCHEMES = ("redis", "rediss", "unix")


def connect(url: str, *, decode_responses: bool = True) -> redis.Redis:
    """A client that has seen the server answer; thread-safe. Replies are str unless `decode_responses` is False.

    Raises: ConfigError: unreachable, wrong or missing password, not allowed, or a URL that is none.
    """
    shown = redact(url)
    check_scheme(url)
    try:
        client = redis.Redis.from_url(
            url,
            decode_responses=decode_responses,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
        )
        client.ping()
    except ValueError as error:
        raise ConfigError(
            f"Redis URL {shown} is malformed: {error}; expected redis://[user:password@]host:port"
        ) from None
    except redis.RedisError as error:
        raise ConfigError(f"Redis at {shown} {_explain(error, has_password=shown != url)}") from error
    return client


@contextlib.contextmanager
def redis_errors() -> Iterator[None]:
    """Turns errors of Redis commands inside into Unavailable: outages, fail-overs and full memory all may pass."""
    try:
        yield
    except redis.RedisError as error:
        raise Unavailable(f"Redis does not do its part: {error}") from error


def redact(url: str) -> str:
    """The URL without its password, for messages.

    >>> redact("redis://ann:secret@db:6379/0")
    'redis://ann:***@db:6379/0'
    >>> redact("unix:///run/redis.sock?db=1&password=secret")
    'unix:///run/redis.sock?db=1&password=***'
    """
    url = re.sub(r"(?<=[?&]password=)[^&]*", "***", url)
    # Greedy up to the last @ before the path: a password may hold an unescaped one.
    return re.sub(r"^([a-z]+://[^:@/]*):[^/]*@", r"\1:***@", url, flags=re.IGNORECASE)


def check_scheme(url: str) -> None:
    """Raises: ConfigError: not a redis://, rediss:// or unix:// URL."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ConfigError(
            f"Redis URL {redact(url)!r} has the scheme {scheme!r}; "
            "expected redis://host:port, rediss://host:port or unix:///path.sock"
        )


def _explain(error: redis.RedisError, *, has_password: bool) -> str:
    text = str(error)
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthenticationWrongNumberOfArgsError):
        if not has_password:
            return f"wants a password ({text}); put it into REDIS_URL: redis://:PASSWORD@host:port"
        return f"refuses the user or the password ({text}); correct them in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"does not let this user do that ({text}); Tandem needs GET, SET, DEL, sets and EVAL on keys tandem:*"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return f"is still loading its data ({text}); try again in a moment"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"is unreachable ({text}); is the server running, and is REDIS_URL its address?"
    return f"answered with an error: {text}"
