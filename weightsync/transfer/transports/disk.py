"""The transport disk: a folder that every participant can reach; slower than memory, but late joiners can read it."""

import time
from pathlib import Path

import torch

from servicekit.errors import Aborted, DigestMismatch, InvalidRequest, TandemError
from tandem_files.run_paths import inside
from weightsync.layouts.layout import Layout
from weightsync.plans.messages import Message, cut_messages
from weightsync.plans.plan import TransferPlan, make_plan
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.transports.disk_files import (
    VERSION,
    PublishedVersion,
    boxes_to_write,
    latest_folder,
    write_manifest,
    write_rank,
)
from weightsync.transfer.transports.packing import Packer
from weightsync.transfer.transports.transport import TransferJob, TransferStats, message_digest

_ERROR_CHARS = 300


def check_folder(folder: str, allowed: Path | None) -> None:
    """Raise InvalidRequest unless it is this process's folder of published weights, or below it."""
    if allowed is None:
        raise InvalidRequest(f"the round asks for {folder!r}, but no folder for the transport disk is set here")
    inside(folder, allowed, "disk_folder", or_itself=True)


class DiskTransport:
    """The transport disk: trainer ranks write their boxes, rank 0 the manifest; then every receiver reads its slices.

    Args:
        folder: of all versions (sync.disk_folder).
    """

    name = "disk"

    def __init__(self, communicator: Communicator, folder: Path) -> None:
        self._comm = communicator
        self._folder = folder

    def run(self, job: TransferJob) -> TransferStats:
        """Write this rank's boxes, or read its slices: see Transport."""
        version = self._folder / f"v{job.policy_version}-{job.round_id}"
        if not VERSION.fullmatch(version.name) or version.parent != self._folder:
            raise InvalidRequest(f"round id {job.round_id!r} cannot be part of a folder's name; letters, digits, . _ -")
        trainers = job.participants.trainer.world_size
        stats = TransferStats()
        card = b""
        if self._comm.rank < trainers:
            card = self._write(job, version, stats)
        digests = self._exchange(job, card)[:trainers]
        card = self._complete(job, version, digests) if self._comm.rank == 0 else b""
        self._exchange(job, card)
        if self._comm.rank >= trainers:
            self._read(job, version, stats)
        self._exchange(job, b"")  # no rank returns before all have read: the next version removes old ones
        return stats

    def close(self) -> None:
        """Release nothing: the files stay."""

    def _write(self, job: TransferJob, version: Path, stats: TransferStats) -> bytes:
        layout = next(iter(job.plan.plans.values())).source
        try:
            boxes = boxes_to_write(layout, self._comm.rank, job.packer.matrices)
            digest, stats.bytes_sent = write_rank(version, self._comm.rank, boxes, job.packer.dtype)
        except OSError as error:
            return _failure(error)
        stats.num_messages = len(boxes)
        return digest.encode()

    def _complete(self, job: TransferJob, version: Path, digests: list[bytes]) -> bytes:
        try:
            write_manifest(
                version,
                policy_version=job.policy_version,
                round_id=job.round_id,
                model=job.model,
                rank_digests=[digest.decode() for digest in digests],
            )
        except OSError as error:
            return _failure(error)
        return b""

    def _exchange(self, job: TransferJob, card: bytes) -> list[bytes]:
        cards = self._comm.exchange(card, max(0.001, job.deadline - time.monotonic()))
        for slot, theirs in zip(self._comm.slots, cards, strict=True):
            if theirs.startswith(b"!"):
                raise Aborted(f"{slot}: {theirs[1:].decode(errors='replace')}")
        return cards

    def _read(self, job: TransferJob, version: Path, stats: TransferStats) -> None:
        published = PublishedVersion(version, job.model)
        if (published.policy_version, published.round_id) != (job.policy_version, job.round_id):
            raise DigestMismatch(
                f"stale manifest in {version}: version {published.policy_version} of round {published.round_id}"
            )
        replica, rank = self._comm.slots[self._comm.rank].rsplit("/", 1)
        target = job.plan.plans[job.participants.replicas[replica]].target
        read_version(published, target, int(rank), job.packer, stats, job.bucket_bytes)


def read_version(
    published: PublishedVersion, target: Layout, rank: int, packer: Packer, stats: TransferStats, bucket_bytes: int
) -> None:
    """Fill one rank's memory from a version on disk, message by message through one buffer of bucket_bytes."""
    plan = make_plan(published.layout(target), target)
    messages = [m for m in cut_messages(plan, max(1, bucket_bytes // packer.dtype.itemsize)) if m.dst == rank]
    buffer = torch.empty(max((packer.payload_bytes(m) for m in messages), default=0), dtype=torch.uint8)
    stats.staging_bytes = buffer.numel()
    for message in messages:
        payload = buffer[: packer.payload_bytes(message)]
        _fill(published, plan, message, payload.view(packer.dtype))
        payload = payload.to(packer.device)
        stats.received.append((message, message_digest(packer, message, packer.split(message, payload))))
        packer.unpack(message, payload)
        stats.num_messages += 1
        stats.bytes_received += payload.numel()


def _fill(published: PublishedVersion, plan: TransferPlan, message: Message, flat: torch.Tensor) -> None:
    begin = 0
    for op in message.ops:
        rows = slice(int(op["src_row"]), int(op["src_row"] + op["rows"]))
        cols = slice(int(op["src_col"]), int(op["src_col"] + op["cols"]))
        block = published.read(message.src, plan.source.params[op["src_param"]], rows, cols)
        if block.dtype != flat.dtype:
            raise DigestMismatch(f"{published.folder} holds {block.dtype}, this rank {flat.dtype}")
        flat[begin : begin + block.numel()].view(block.shape).copy_(block)
        begin += block.numel()


def open_latest(folder: Path, model: str, at_least: int) -> PublishedVersion:
    """Open the newest complete version, for a late joiner or a cold start.

    Raises: NotReady: nothing is published; StaleVersion: it is older than at_least; see PublishedVersion.
    """
    published = PublishedVersion(latest_folder(folder), model)
    published.require(at_least=at_least)
    return published


def _failure(error: OSError | TandemError) -> bytes:
    return f"!cannot write: {error}"[:_ERROR_CHARS].encode()
