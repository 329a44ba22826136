"""Copies what an S3-compatible storage has below a prefix into a folder: `python -m launcher.deploy.models.s3`.

    python -m launcher.deploy.models.s3 BUCKET/PREFIX FOLDER

runs in the Job of `tandem deploy fetch s3://...`, in the coordinator's image; launcher/deploy/s3.py has its variables.

A file comes as a whole or not at all: it is written beside its place and compared with the length and, where the
storage's ETag is an MD5, the digest. Files that have come before, by their length, are kept: an attempt continues.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from launcher.deploy.s3 import Bucket, StoredObject, run_program, split_place
from servicekit.errors import ConfigError, DigestMismatch
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG

_MD5 = re.compile(r"[0-9a-f]{32}")


def fetch(bucket: Bucket, prefix: str, target: Path) -> int:
    """Copy all files below a prefix into a folder. Returns: how many were copied, without those that were kept.

    Raises: ConfigError: there is no such bucket or prefix, or it is refused; Unavailable; DigestMismatch; OSError.
    """
    found = _files(bucket.list(prefix), prefix)
    if not found:
        raise ConfigError(f"{bucket.place(prefix)}: there are no files below it")
    copied = 0
    for stored in found:
        place = target / stored.key.removeprefix(f"{prefix}/" if prefix else "")
        if ".." in place.relative_to(target).parts:
            raise ConfigError(f"{bucket.place(stored.key)}: leads out of the folder")
        if place.is_file() and place.stat().st_size == stored.size:
            continue
        _fetch_one(bucket, stored, place)
        print(f"{place}  {stored.size:,} bytes", flush=True)
        copied += 1
    return copied


def _files(found: Sequence[StoredObject], prefix: str) -> list[StoredObject]:
    """Leave out what stands for a folder: an empty object with the name of one."""
    folders = {prefix} | {str(parent) for stored in found for parent in PurePosixPath(stored.key).parents}
    return [stored for stored in found if stored.size or stored.key not in folders]


def _fetch_one(bucket: Bucket, stored: StoredObject, place: Path) -> None:
    """Copy a file. Raises: DigestMismatch, ConfigError, Unavailable, OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part, digest, size = place.with_name(place.name + ".part"), hashlib.md5(usedforsecurity=False), 0
    with part.open("wb") as file:
        for block in bucket.read(stored):
            digest.update(block)
            file.write(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    is_md5 = _MD5.fullmatch(stored.etag) is not None
    if size != stored.size or (is_md5 and stored.etag != digest.hexdigest()):
        part.unlink()
        raise DigestMismatch(
            f"{bucket.place(stored.key)}: {size} of {stored.size} bytes, MD5 {digest.hexdigest()}, ETag {stored.etag}"
        )
    part.replace(place)


def main(arguments: list[str]) -> int:
    """Run the copy. Returns: the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m launcher.deploy.models.s3 BUCKET/PREFIX FOLDER\n")
        return EXIT_BAD_CONFIG
    place, folder = arguments
    name, prefix = split_place(place)
    return run_program(lambda: f"{fetch(Bucket(name, os.environ), prefix, Path(folder))} files copied")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
