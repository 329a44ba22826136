"""Copies what an S3-compatible storage has below a prefix into a folder: `python -m launcher.deploy.models.s3`.

    python -m launcher.deploy.models.s3 BUCKET/PREFIX FOLDER

runs in the Job of `tandem deploy fetch s3://...`, in the coordinator's image. AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION and AWS_ENDPOINT_URL are what they are elsewhere; without a key the bucket is read anonymously.

A file comes as a whole or not at all: it is written beside its place and compared with the length and, where the
storage's ETag is an MD5, the digest. Files that have come before, by their length, are kept: an attempt continues.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from servicekit.errors import ConfigError, DigestMismatch, TandemError, Unavailable
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK

CONNECT_S, REQUEST_S, TRIES = 10.0, 60.0, 5
_BLOCK = 4 << 20
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def open_storage(environ: Mapping[str, str]) -> Any:
    """Open the storage that the environment names. Raises: ConfigError: half of a key, or no address."""
    key, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
    if bool(key) != bool(secret):
        raise ConfigError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: one is set without the other")
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "request_timeout": REQUEST_S,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
    }
    options |= {"access_key": key, "secret_key": secret} if key else {"anonymous": True}
    if region := environ.get("AWS_REGION", ""):
        options["region"] = region
    if address := environ.get("AWS_ENDPOINT_URL", ""):
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(f"AWS_ENDPOINT_URL={address}: not an address; give https://HOST")
        options |= {"endpoint_override": url.netloc, "scheme": url.scheme}
    return fs.S3FileSystem(**options)


def fetch(storage: Any, source: str, target: Path) -> int:
    """Copy all files below a prefix into a folder. Returns: how many were copied, without those that were kept.

    Raises: ConfigError: there is no such bucket or prefix, or it is refused; Unavailable; DigestMismatch.
    """
    prefix = PurePosixPath(source)
    try:
        found = storage.get_file_info(fs.FileSelector(source, recursive=True))
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"s3://{source}: {error}") from error
    except OSError as error:
        kind = ConfigError if "ACCESS_DENIED" in str(error) or "NO_SUCH" in str(error) else Unavailable
        raise kind(f"s3://{source}: {error}") from error
    files = sorted((info for info in found if info.type == fs.FileType.File), key=lambda info: str(info.path))
    if not files:
        raise ConfigError(f"s3://{source}: there are no files below it")
    copied = 0
    for info in files:
        place = target / PurePosixPath(info.path).relative_to(prefix)
        if ".." in place.relative_to(target).parts:
            raise ConfigError(f"s3://{info.path}: leads out of the folder")
        if place.is_file() and place.stat().st_size == info.size:
            continue
        _fetch_one(storage, info, place)
        print(f"{place}  {info.size:,} bytes", flush=True)
        copied += 1
    return copied


def _fetch_one(storage: Any, info: Any, place: Path) -> None:
    """Copy a file. Raises: DigestMismatch, Unavailable."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part, digest, size = place.with_name(place.name + ".part"), hashlib.md5(usedforsecurity=False), 0
    try:
        with storage.open_input_stream(info.path) as stream, part.open("wb") as file:
            tag = {key.lower(): text for key, text in _metadata(stream).items()}.get("etag", "")
            while block := stream.read(_BLOCK):
                digest.update(block)
                file.write(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise Unavailable(f"s3://{info.path}: {error}") from error
    named = _MD5.fullmatch(tag)
    if size != info.size or (named is not None and named[1] != digest.hexdigest()):
        part.unlink()
        raise DigestMismatch(f"s3://{info.path}: {size} of {info.size} bytes, MD5 {digest.hexdigest()}, ETag {tag}")
    part.replace(place)


def _metadata(stream: Any) -> dict[str, str]:
    """Read what the storage says of a file; values may be bytes."""
    found = stream.metadata() or {}
    text = {key: value for key, value in found.items() if value is not None}
    return {_text(key): _text(value) for key, value in text.items()}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def main(arguments: list[str]) -> int:
    """Run the copy. Returns: the exit code; the last line of an error names what was refused."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m launcher.deploy.models.s3 BUCKET/PREFIX FOLDER\n")
        return EXIT_BAD_CONFIG
    try:
        copied = fetch(open_storage(os.environ), arguments[0].strip("/"), Path(arguments[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_CONFIG
    except (TandemError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    print(f"{copied} files copied")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
