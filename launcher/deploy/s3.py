"""S3-compatible storage, as the Jobs of `tandem deploy fetch` and `tandem deploy results --to` reach it.

AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL are what they are elsewhere; without a key
requests are anonymous. An object comes into being as a whole: in one request, or, above PART_BYTES, in parts that the
storage puts together at the end; what was begun and not ended is aborted. Requests are repeated TRIES times.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from servicekit.errors import ConfigError, TandemError, Unavailable
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK

CONNECT_S, TRIES = 10.0, 5
# Time-out of one request. A 16 MiB part needs 140 kB/s to fit. Tries together end after RETRY_S.
REQUEST_S, RETRY_S = 120.0, 300.0
PART_BYTES = 16 << 20
# Parts at a time: with what is being read they are all that is in memory.
PARTS_AT_ONCE = 4
# S3 takes 10,000 parts; this many of PART_BYTES are 140 GiB.
_MOST_PARTS = 9000
_SHA256 = "sha256"
_DEFAULT_REGION = "us-east-1"
_SAID = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_NO_BUCKET = "NoSuchBucket"
# What repeating does not change: codes, and texts of the library.
_REFUSALS = frozenset({_NO_BUCKET, "InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect"})
_REFUSED = re.compile(r"status code: 40[13]|incorrectly configured region")


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object of a bucket.

    Attributes:
        etag: without quotes; the MD5, or that of the parts' MD5s, unless the storage encrypts with keys of its own.
        sha256: what was stored with it, as we do; "": nothing, or only listed.
    """

    key: str
    size: int
    etag: str
    sha256: str = ""


class Bucket:
    """A bucket that the environment names the storage of. Raises: ConfigError: half of a key, or no address."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name, self.address = name, environ.get("AWS_ENDPOINT_URL", "")
        key, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
        if bool(key) != bool(secret):
            raise ConfigError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: one is set without the other")
        options: dict[str, Any] = {"region": environ.get("AWS_REGION", "") or _DEFAULT_REGION}
        options |= {"access_key_id": key, "secret_access_key": secret} if key else {"skip_signature": True}
        if self.address:
            url = urlsplit(self.address)
            if url.scheme not in ("http", "https") or not url.netloc:
                raise ConfigError(f"AWS_ENDPOINT_URL={self.address}: not an address; give https://HOST")
            options["endpoint"] = self.address
        self._store = S3Store(
            name,
            **options,
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={"max_retries": TRIES - 1, "retry_timeout": timedelta(seconds=RETRY_S)},
        )

    def list(self, prefix: str) -> list[StoredObject]:
        """List the objects below a prefix, in the order of their keys. Raises: ConfigError, Unavailable."""
        with self._translated(prefix):
            found = [meta for page in obstore.list(self._store, prefix or None) for meta in page]
        objects = (StoredObject(key=meta["path"], size=meta["size"], etag=_bare(meta["e_tag"])) for meta in found)
        return sorted(objects, key=lambda stored: stored.key)

    def find(self, key: str) -> StoredObject | None:
        """Return an object; None: there is none. Raises: ConfigError, Unavailable."""
        with self._translated(key):
            try:
                found = obstore.get(self._store, key, options={"head": True})
            except FileNotFoundError as error:
                self._check_bucket(key, error)
                return None
        meta = found.meta
        sha256 = str(found.attributes.get(_SHA256, ""))
        return StoredObject(key=key, size=meta["size"], etag=_bare(meta["e_tag"]), sha256=sha256)

    def read(self, stored: StoredObject) -> Iterator[bytes]:
        """Read an object in blocks, a request each. Raises: ConfigError, Unavailable, also if it changes."""
        for begin in range(0, stored.size, PART_BYTES):
            end = min(begin + PART_BYTES, stored.size)
            with self._translated(stored.key):
                try:
                    options: Any = {"range": (begin, end), "if_match": f'"{stored.etag}"'}
                    block = bytes(obstore.get(self._store, stored.key, options=options).bytes())
                except FileNotFoundError as error:
                    raise Unavailable(f"{self.place(stored.key)} was deleted while it was read") from error
            yield block

    def read_small(self, key: str) -> bytes | None:
        """Read an object that fits in memory; None: there is none. Raises: ConfigError, Unavailable."""
        with self._translated(key):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError as error:
                self._check_bucket(key, error)
                return None

    def write(self, key: str, blocks: Iterable[bytes], size: int, sha256: str) -> None:
        """Write an object of `size` bytes; what fails, also what `blocks` raises, leaves none.

        Args:
            sha256: is stored with it; the caller compares.
        Raises: ConfigError, Unavailable.
        """
        part = part_bytes(size)
        with self._translated(key):
            try:
                obstore.put(
                    self._store,
                    key,
                    iter(blocks),
                    attributes={_SHA256: sha256},
                    use_multipart=size > part,
                    chunk_size=part,
                    max_concurrency=PARTS_AT_ONCE,
                )
            except FileNotFoundError as error:
                self._check_bucket(key, error)
                raise

    def place(self, key: str) -> str:
        """Say where an object is, for people."""
        return f"s3://{self.name}/{key}{f' at {self.address}' if self.address else ''}"

    def _check_bucket(self, key: str, error: FileNotFoundError) -> None:
        """Raises: ConfigError: it is the bucket that does not exist."""
        if _NO_BUCKET in str(error):
            raise ConfigError(f"{self.place(key)}: there is no bucket {self.name!r} ({_NO_BUCKET})") from error

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            raise self._error(key, error) from error

    def _error(self, key: str, error: BaseError) -> TandemError:
        """Return ours for an error of the library: its first line, or what the storage said."""
        text = str(error)
        said = _SAID.search(text)
        code = said[1] if said else ""
        kind = ConfigError if code in _REFUSALS or _REFUSED.search(text) else Unavailable
        why = ": ".join(filter(None, said.groups())) if said else text.partition("\n")[0].strip()
        return kind(f"{self.place(key)}: {why}")


def run_program(program: Callable[[], str]) -> int:
    """Run what a Job's container does, and print what it returns.

    Returns: the exit code; the last line of an error names what was refused.
    """
    try:
        print(program())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_CONFIG
    except (TandemError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    return EXIT_OK


def part_bytes(size: int) -> int:
    """Return the bytes of a part of an object; what is not larger than one is written in one request.

    >>> part_bytes(10**9) == PART_BYTES, part_bytes(2**40) // 2**20
    (True, 117)
    """
    return max(PART_BYTES, (size // _MOST_PARTS // (1 << 20) + 1) << 20)


def split_place(place: str) -> tuple[str, str]:
    """Split BUCKET/PREFIX.

    >>> split_place("lab/models/tiny/"), split_place("lab")
    (('lab', 'models/tiny'), ('lab', ''))
    """
    bucket, _, prefix = place.strip("/").partition("/")
    return bucket, prefix


def _bare(etag: str | None) -> str:
    return (etag or "").strip('"')
