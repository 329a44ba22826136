"""Published weights in a folder: safetensors files of boxes of canonical tensors, and manifests with their digests.

    <folder>/LATEST                       name of the newest complete version
    <folder>/v7-<round>/rank-0.safetensors  boxes that trainer rank 0 holds, keyed "name|row+rows|col+cols"
    <folder>/v7-<round>/rank-0.json       xxh3-128 of every block of rows of every box
    <folder>/v7-<round>/manifest.json     written last: version, model, digest and size of every rank's files

A file gets its name when it is complete (written beside, then renamed), the manifest after all others.
"""

import functools
import json
import mmap
import os
import re
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from servicekit.errors import ConfigError, DigestMismatch, NotReady, StaleVersion
from servicekit.logs import get_logger
from tandem_files.atomic import SCRATCH_SUFFIX, remove_each, write_bytes_atomic
from tandem_files.model.safetensors_header import DamagedFile, TensorInfo, parse_header
from tandem_files.run_paths import FolderKind
from weightsync.layouts.layout import SHARD_DTYPE, Ids, Layout
from weightsync.plans.offers import one_copy
from weightsync.transfer.tensors import memory_of

FORMAT = 1
BLOCK_BYTES = 2**20  # unit of digests: a receiver that wants a slice reads and checks whole blocks of rows
VERSION = re.compile(r"v\d+-[\w.-]+")  # folder of one round: its policy version and its id
# An unfinished version has no manifest.
PUBLISHED = FolderKind(
    name="published weights",
    mark="",
    entry=re.compile(rf"\.?(rank-\d+\.(json|safetensors)|manifest\.json)({SCRATCH_SUFFIX})?"),
)
log = get_logger(__name__)
_LENGTH = struct.Struct("<Q")
_KEY = re.compile(r"^(.+)\|(\d+)\+(\d+)\|(\d+)\+(\d+)$")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Box:
    """A slice of a canonical tensor, and its block [rows, cols] in memory."""

    tensor: str
    row: int
    col: int
    values: torch.Tensor

    @property
    def key(self) -> str:
        """Name of the box in a file."""
        rows, cols = self.values.shape
        return f"{self.tensor}|{self.row}+{rows}|{self.col}+{cols}"


def boxes_to_write(layout: Layout, rank: int, matrices: Mapping[str, torch.Tensor]) -> list[Box]:
    """Select the boxes that this rank writes: those of which it is the lowest rank that holds them."""
    shards = one_copy(layout).shards
    boxes = []
    for shard in shards[shards["rank"] == rank]:
        matrix = matrices[layout.params[shard["param"]]]
        row, col = int(shard["param_row"]), int(shard["param_col"])
        values = matrix[row : row + int(shard["rows"]), col : col + int(shard["cols"])]
        boxes.append(
            Box(tensor=layout.tensors[shard["tensor"]], row=int(shard["row"]), col=int(shard["col"]), values=values)
        )
    return boxes


def write_rank(folder: Path, rank: int, boxes: Sequence[Box], dtype: torch.dtype) -> tuple[str, int]:
    """Write a rank's boxes, block by block. Returns: digest of its list of digests; bytes of the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for box in boxes:
        num_bytes = box.values.numel() * dtype.itemsize
        header[box.key] = {
            "dtype": _NAMES[dtype],
            "shape": list(box.values.shape),
            "data_offsets": [size, size + num_bytes],
        }
        size += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digests: dict[str, list[str]] = {}
    scratch = folder / f".rank-{rank}.safetensors"
    with scratch.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for box in boxes:
            digests[box.key] = []
            for block in box.values.split(_rows_per_block(box.values.shape[1], dtype)):
                held = block.to(device="cpu", dtype=dtype).contiguous()
                digests[box.key].append(xxhash.xxh3_128_hexdigest(memory_of(held)))
                file.write(memory_of(held))
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(folder / f"rank-{rank}.safetensors")
    listing = json.dumps({"format": FORMAT, "digests": digests}).encode()
    write_bytes_atomic(folder / f"rank-{rank}.json", listing)
    return xxhash.xxh3_128_hexdigest(listing), size


def _rows_per_block(cols: int, dtype: torch.dtype) -> int:
    return max(1, BLOCK_BYTES // (cols * int(dtype.itemsize)))


def write_manifest(
    folder: Path, *, policy_version: int, round_id: str, model: str, rank_digests: Sequence[str]
) -> None:
    """Complete a version, point LATEST at it, and remove all others but the one before."""
    manifest = {
        "format": FORMAT,
        "policy_version": policy_version,
        "round_id": round_id,
        "model": model,
        "ranks": list(rank_digests),
    }
    write_bytes_atomic(folder / "manifest.json", json.dumps(manifest, indent=2).encode())
    latest = folder.parent / "LATEST"
    before = latest.read_text(encoding="utf-8").strip() if latest.exists() else ""
    write_bytes_atomic(latest, folder.name.encode())
    keep = {folder.name, before}
    for old in folder.parent.glob("v*-*"):
        # The folder may be shared with other programs: remove only what is ours.
        if old.name not in keep and VERSION.fullmatch(old.name) and PUBLISHED.is_in(old):
            for text in remove_each([old]):
                _warn_of_left(text)


@functools.cache
def _warn_of_left(text: str) -> None:
    """Warn of a file that could not be removed, once."""
    log.warning("old published weights not removed, tried again with the next", why=text)


def latest_folder(folder: Path) -> Path:
    """Find the folder of the newest complete version. Raises: NotReady: nothing was published yet."""
    try:
        return folder / (folder / "LATEST").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise NotReady(f"{folder} holds no published weights (no LATEST)") from None


class PublishedVersion:
    """A version on disk, open for reading; every block is checked before it is used.

    Args:
        folder: of the version.
        model: fingerprint of the reader's model.
    Raises: ConfigError: another model; DigestMismatch: naming a file that is torn or does not belong to the manifest.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        manifest = _read_json(folder / "manifest.json")
        if manifest.get("format") != FORMAT:
            raise ConfigError(f"{folder}: manifest format {manifest.get('format')}, this release reads {FORMAT}")
        if manifest["model"] != model:
            raise ConfigError(f"{folder} holds another model: {manifest['model']}, not {model}")
        self.policy_version = int(manifest["policy_version"])
        self.round_id = str(manifest["round_id"])
        self._files = [_RankFile(folder, rank, digest) for rank, digest in enumerate(manifest["ranks"])]

    def require(self, *, at_least: int) -> None:
        """Raise StaleVersion if the version is older than that."""
        if self.policy_version < at_least:
            raise StaleVersion(f"{self.folder} holds version {self.policy_version}, at least {at_least} is needed")

    def layout(self, target: Layout) -> Layout:
        """Make the layout of the boxes, in terms of the target's canonical tensors."""
        ids = {name: i for i, name in enumerate(target.tensors)}
        keys: list[str] = []
        rows: list[tuple[int, ...]] = []
        for rank, file in enumerate(self._files):
            for key in file.keys:
                name, *numbers = _split(key)
                if name not in ids:
                    raise ConfigError(f"{self.folder} holds {name}, which this model does not have")
                row, height, col, width = map(int, numbers)
                rows.append((rank, ids[name], len(keys), row, height, col, width, 0, 0, False))
                keys.append(key)
        shards = np.array(rows, dtype=SHARD_DTYPE)
        ranks: Ids = np.stack([shards["rank"], shards["param"]], axis=1)
        return Layout(
            num_ranks=len(self._files),
            tensors=target.tensors,
            tensor_shapes=target.tensor_shapes,
            params=tuple(keys),
            param_shapes=tuple((int(s["rows"]), int(s["cols"])) for s in shards),
            rank_params=ranks,
            shards=shards,
        )

    def read(self, rank: int, key: str, rows: slice, cols: slice) -> torch.Tensor:
        """Read a block of a box. Raises: DigestMismatch: its bytes are not those that were written."""
        return self._files[rank].read(key, rows, cols)


class _RankFile:
    """One rank's file, mapped."""

    def __init__(self, folder: Path, rank: int, digest: str) -> None:
        self._path = folder / f"rank-{rank}.safetensors"
        listing = _read_bytes(folder / f"rank-{rank}.json")
        if xxhash.xxh3_128_hexdigest(listing) != digest:
            raise DigestMismatch(f"{folder / f'rank-{rank}.json'} does not belong to the manifest beside it")
        self._digests: dict[str, list[str]] = json.loads(listing)["digests"]
        self._data, self._header = _map(self._path)
        missing = sorted(set(self._digests) ^ set(self._header))
        if missing:
            raise DigestMismatch(f"{self._path} and its list of digests differ in {missing[0]}")
        self._checked: set[tuple[str, int]] = set()

    @property
    def keys(self) -> Iterable[str]:
        return self._digests.keys()

    def read(self, key: str, rows: slice, cols: slice) -> torch.Tensor:
        entry = self._header[key]
        dtype = _DTYPES[entry.dtype]
        height, width = entry.shape
        matrix = self._data[entry.begin : entry.end].view(dtype).view(height, width)
        per_block = _rows_per_block(width, dtype)
        for block in range(rows.start // per_block, -(-rows.stop // per_block)):
            self._check(key, block, matrix[block * per_block : (block + 1) * per_block])
        return matrix[rows, cols]

    def _check(self, key: str, block: int, values: torch.Tensor) -> None:
        if (key, block) in self._checked:
            return
        found = xxhash.xxh3_128_hexdigest(values.reshape(-1).view(torch.uint8).numpy().data)
        if found != self._digests[key][block]:
            raise DigestMismatch(f"{self._path}: block {block} of {key} is not what the trainer wrote")
        self._checked.add((key, block))


def _map(path: Path) -> tuple[torch.Tensor, dict[str, TensorInfo]]:
    """Map the file. Returns: its bytes and its header. Raises: DigestMismatch: it is cut off or no safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = parse_header(file, size)
            memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except DamagedFile as error:
        raise DigestMismatch(f"{path} {error}: it is torn") from None
    except (OSError, ValueError) as error:
        raise DigestMismatch(f"{path} cannot be read: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has no read-only tensors
        return torch.frombuffer(memory, dtype=torch.uint8), header


def _split(key: str) -> tuple[str, ...]:
    match = _KEY.match(key)
    if match is None:
        raise DigestMismatch(f"{key!r} is not the name of a box")
    return match.groups()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DigestMismatch(f"{path} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(_read_bytes(path))
    except ValueError as error:
        raise DigestMismatch(f"{path} is torn: {error}") from None
    return value
