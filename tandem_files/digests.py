"""Digests of files, with which a reader finds out whether it reads the bytes that were written.

A folder's manifest, `digests.json`, holds {path of a file below the folder: {"bytes": n, "xxh3_128": hex}}. It detects
accidents: torn writes, bad memory, bad disks. It is not a signature. The safetensors files of a trainer checkpoint have
digests of their tensors in their metadata, so that a damaged tensor can be named.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from tandem_files.atomic import write_json_atomic
from tandem_files.model.safetensors_header import TensorInfo, read_header, read_metadata

MANIFEST = "digests.json"
# Digest of a file: its size in "bytes", and "xxh3_128" in hex.
Digest = Mapping[str, Any]
_CHUNK_BYTES = 8 << 20
_MAX_THREADS = 8


def file_digest(path: Path) -> dict[str, Any]:
    """Compute the digest of a file as it is on disk now. Raises: OSError."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def text_digest(text: str) -> str:
    """Compute the xxh3-128 of a text, in hex."""
    return xxhash.xxh3_128(text.encode()).hexdigest()


def write_manifest(folder: Path, digests: Mapping[str, Digest]) -> None:
    """Write a folder's manifest.

    Args:
        digests: digest of every file, by path below the folder.
    """
    write_json_atomic(folder / MANIFEST, dict(digests))


def read_manifest(folder: Path) -> dict[str, Digest]:
    """Read a folder's manifest. Raises: OSError; ValueError: the file is not a manifest."""
    digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(digests, dict) or not all(isinstance(digest, dict) for digest in digests.values()):
        raise ValueError(f"{folder / MANIFEST} is not a table of digests")
    return digests


def damages(folder: Path, digests: Mapping[str, Digest]) -> list[str]:
    """Compare the files of a manifest with their digests. Returns: a sentence per damaged file."""
    if not digests:
        return []
    with ThreadPoolExecutor(min(_MAX_THREADS, len(digests), os.cpu_count() or 1)) as pool:
        found = pool.map(lambda item: _damage(folder, *item), sorted(digests.items()))
        return [text for text in found if text]


def size_damages(folder: Path, digests: Mapping[str, Digest]) -> list[str]:
    """Compare the sizes of a manifest's files, which are not read. Returns: a sentence per damaged file."""
    return [text for name, digest in sorted(digests.items()) if (text := _damage(folder, name, digest, deep=False))]


def _damage(folder: Path, name: str, digest: Digest, *, deep: bool = True) -> str:
    try:
        size = (folder / name).stat().st_size
        if size != digest.get("bytes"):
            return f"{name} has {size} bytes, {digest.get('bytes')} were written"
        if deep and file_digest(folder / name) != digest:
            return f"{name} has other bytes than were written{_in_tensors(folder / name)}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def _in_tensors(path: Path) -> str:
    """Name the tensors of a file that are not as they were written; "" if the file has no digests of its tensors."""
    if path.suffix != ".safetensors":
        return ""
    try:
        tensors, written = read_header(path), read_metadata(path)
    except ValueError as error:
        return f", in its header ({error})"
    wrong = [
        name for name, info in tensors.items() if name in written and not _is_as_written(path, info, written[name])
    ]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f", in {wrong[0]}{more}" if wrong else ""


def _is_as_written(path: Path, info: TensorInfo, checksum: str) -> bool:
    """Whether a tensor's bytes have the digest with which its checksum ends (weightsync/transfer/tensors.py)."""
    state, left = xxhash.xxh3_128(), info.end - info.begin
    with path.open("rb", buffering=0) as file:
        file.seek(info.begin)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            state.update(chunk)
            left -= len(chunk)
    return checksum.endswith(state.hexdigest())
