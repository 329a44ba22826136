"""Copies the results of a run into S3-compatible storage: `python -m launcher.deploy.results.upload`.

    python -m launcher.deploy.results.upload RUN FOLDER BUCKET/PREFIX [--checkpoints] [--only PATH]...

runs in the Job of `tandem deploy results RUN --to s3://...`, in the coordinator's image; launcher/deploy/s3.py has its
variables. What counts as done is in the manifest, BUCKET/PREFIX/tandem-results.json, with the size and SHA-256 of each
file: a file is in it only after it was compared with what the storage has, and leaves it before it is replaced.

A file that is there already with the same content is kept, so that an attempt continues, and a later one adds.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.deploy.results.remote import walk
from launcher.deploy.results.selection import CopyResult, is_chosen, skipped_folders
from launcher.deploy.s3 import Bucket, part_bytes, run_program, split_place
from servicekit.errors import ConfigError, DigestMismatch
from tandem_files.run_folder import read_identity

MANIFEST = "tandem-results.json"
# A file that is written to while it is read is read again.
TRIES = 5
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a file has been read as.

    Attributes:
        etag: what a storage says that does not encrypt: the MD5, or that of the parts' MD5s and their number.
    """

    size: int
    sha256: str
    etag: str


@dataclass(kw_only=True)
class Manifest:
    """What is in the storage, whole: path -> size and SHA-256. Written by `upload` only."""

    run: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"run": self.run, "files": self.files}, indent=1, sort_keys=True).encode() + b"\n"


def upload(bucket: Bucket, prefix: str, root: Path, run: str, names: Sequence[str]) -> CopyResult:
    """Copy files below `root` to below a prefix; those that are there with the same content are kept.

    Raises: ConfigError: no such bucket, it is refused, or the prefix has another run's results; DigestMismatch: a file
        differs from what was sent, again and again; Unavailable; OSError.
    """
    manifest = _read_manifest(bucket, _key(prefix, MANIFEST), run)
    before, done = manifest.body(), CopyResult()
    for name in names:
        key, path = _key(prefix, name), root / name
        local = describe(path)
        if holds(bucket, key, local):
            done.kept += 1
        else:
            if manifest.files.pop(name, None) is not None:
                _write_manifest(bucket, prefix, manifest)
            local = _send(bucket, key, path, local)
            done.files, done.size = done.files + 1, done.size + local.size
            print(f"{name}  {local.size:,} bytes", flush=True)
        manifest.files[name] = {"size": local.size, "sha256": local.sha256}
    if done.files or manifest.body() != before:
        _write_manifest(bucket, prefix, manifest)
    return done


def describe(path: Path) -> Local:
    """Read a file. Raises: OSError."""
    size = path.stat().st_size
    part, whole, tags, read = part_bytes(size), hashlib.sha256(), [], 0
    digest = hashlib.md5(usedforsecurity=False)
    for block in _blocks(path, size):
        whole.update(block)
        digest.update(block)
        read += len(block)
        if read % part == 0:
            tags.append(digest)
            digest = hashlib.md5(usedforsecurity=False)
    if read % part or not tags:
        tags.append(digest)
    etag = tags[0].hexdigest()
    if len(tags) > 1:
        joined = b"".join(tag.digest() for tag in tags)
        etag = f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"
    return Local(size=read, sha256=whole.hexdigest(), etag=etag)


def holds(bucket: Bucket, key: str, local: Local) -> bool:
    """Return whether the storage has this content: by length, the SHA-256 that we stored with it, and the ETag.

    Where the ETag is no MD5, as with a storage that encrypts with keys of its own, the object is read back.
    """
    found = bucket.find(key)
    if found is None or (found.size, found.sha256) != (local.size, local.sha256):
        return False
    if found.etag == local.etag:
        return True
    whole = hashlib.sha256()
    for block in bucket.read(found):
        whole.update(block)
    return whole.hexdigest() == local.sha256


def _send(bucket: Bucket, key: str, path: Path, local: Local) -> Local:
    """Copy a file and compare, in as many tries as it takes. Returns: what was copied. Raises: as `upload`."""
    for _ in range(TRIES):
        sent = hashlib.sha256()
        bucket.write(key, _hashed(_blocks(path, local.size), sent), local.size, local.sha256)
        if sent.hexdigest() == local.sha256 and holds(bucket, key, local):
            return local
        local = describe(path)
    raise DigestMismatch(f"{path} could not be copied whole to {bucket.place(key)} in {TRIES} tries; is it written to?")


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file; what is appended meanwhile is not of it."""
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _BLOCK))):
            size -= len(block)
            yield block


def _hashed(blocks: Iterator[bytes], digest: Any) -> Iterator[bytes]:
    for block in blocks:
        digest.update(block)
        yield block


def _key(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _read_manifest(bucket: Bucket, key: str, run: str) -> Manifest:
    """Read what earlier attempts have done. Raises: ConfigError: it is another run's; Unavailable."""
    body = bucket.read_small(key)
    if body is None:
        return Manifest(run=run)
    try:
        found = json.loads(body)
        manifest = Manifest(run=str(found["run"]), files=dict(found["files"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{bucket.place(key)} is no manifest of results ({error}): give another prefix") from error
    if manifest.run != run:
        raise ConfigError(f"{bucket.place(key)} is of run {manifest.run!r}, and this is {run!r}: give another prefix")
    return manifest


def _write_manifest(bucket: Bucket, prefix: str, manifest: Manifest) -> None:
    """Replace the manifest. Raises: DigestMismatch, ConfigError, Unavailable."""
    key, body = _key(prefix, MANIFEST), manifest.body()
    bucket.write(key, [body], len(body), hashlib.sha256(body).hexdigest())
    if bucket.read_small(key) != body:
        raise DigestMismatch(f"{bucket.place(key)} is not what was written: does another Job write it?")


def _selected(root: Path, run: str, only: Sequence[str], *, checkpoints: bool) -> list[str]:
    """List the files to copy. Raises: ConfigError: no such folder, another run's, or there are none."""
    if not root.is_dir():
        raise ConfigError(f"the claim has no folder {root}: the run has not started, or it is another claim")
    owner = read_identity(root)
    if owner is not None and run not in (owner.run_id, owner.launch_id):
        raise ConfigError(f"{root} is the folder of run {owner.run_id!r}, not of {run!r}")
    found = walk(root, root, skipped_folders(checkpoints=checkpoints))
    names = [name for name in found if is_chosen(name, only) and name != MANIFEST]
    if not names:
        raise ConfigError(f"{root} has no {', '.join(only) or 'files'} yet")
    return names


def main(arguments: list[str]) -> int:
    """Run the copy. Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launcher.deploy.results.upload")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("place", metavar="BUCKET/PREFIX")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--only", metavar="PATH", action="append", default=[])
    given = parser.parse_args(arguments)

    def copy() -> str:
        name, prefix = split_place(given.place)
        names = _selected(given.folder, given.run, given.only, checkpoints=given.checkpoints)
        bucket = Bucket(name, os.environ)
        done = upload(bucket, prefix, given.folder, given.run, names)
        copied = f"{done.files} files, {done.size:,} bytes copied and compared; {done.kept} were there already"
        return f"{copied}\n{bucket.place(_key(prefix, MANIFEST))} has their SHA-256"

    return run_program(copy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
