"""Commands of rank 0 to the other ranks: it broadcasts protobuf bytes over a gloo group and gathers the outcomes.

One command at a time, on one thread per rank, so that the order of all collectives is the same on every rank:

    rank 0       frame [kind, parts, bytes, timeout, body] -> a longer body   run   <- outcome of each rank
    followers    frame <- a longer body                                        run   outcome -> rank 0

Most commands and outcomes fit into a frame, so that they are one message each way.

A killed peer is noticed immediately, a frozen one by a timeout. An idle rank 0 sends a NOOP every HEARTBEAT_S, so the
group's own timeout does while nothing is done. In a command one rank may read or write, for longer than the others:
these wait for it for as long as the command may take, which the frame says. An outcome is bytes, or a TandemError,
which goes to the caller and leaves the trainer serving. Any other exception is a failure of the trainer: it ends every
rank.
"""

import queue
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from servicekit.errors import ERRORS, Internal, TandemError
from servicekit.logs import get_logger

HEARTBEAT_S = 2.0
# Room for the body of a sync phase, or of an outcome, in its first message.
FRAME_BYTES = 4096
# Longest deadline of calls that read or write (protos/tandem_api/trainer/v1/trainer.proto).
FILES_S = 1800.0
_HEADER, _NUMBER = struct.Struct("<qqqd"), struct.Struct("<q")

log = get_logger(__name__)


class Command(IntEnum):
    """Commands that all ranks execute together."""

    NOOP = 0
    STOP = 1
    TRAIN_STEP = 2
    LOGPROBS = 3
    PUBLISH = 4
    SAVE = 5
    EXPORT = 6
    RESTORE = 7
    CHECK_CHECKPOINT = 8


# Commands in which a rank may read or write alone, a step's profile too.
_WITH_FILES = {Command.TRAIN_STEP, Command.SAVE, Command.EXPORT, Command.RESTORE, Command.CHECK_CHECKPOINT}


# (parts of the request, serialised) -> serialised reply
Handler = Callable[[Sequence[bytes]], bytes]
Handlers = Mapping[Command, Handler]


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """Outcome of a command on one rank. `error` is None after success."""

    body: bytes = b""
    error: TandemError | None = None


@dataclass(frozen=True, kw_only=True)
class _Job:
    command: Command
    parts: Sequence[bytes] = ()
    timeout_s: float | None = None
    replies: "Future[list[bytes]]" = field(default_factory=Future)


class Wire:
    """Moves commands and outcomes over the control group.

    Args:
        timeout_s: the group's own timeout.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # For a peer that may still load its model; then, on a follower, for rank 0 at its part of the last command.
        self._patience_s = FILES_S

    def broadcast(self, command: Command, parts: Sequence[bytes], timeout_s: float) -> None:
        """On rank 0: send a command to all followers.

        Args:
            timeout_s: that a rank may take longer than another; less than the group's timeout is that.
        """
        if self.world_size == 1:
            return
        body = b"".join([_lengths(len(part) for part in parts), *parts])
        frame = _frame((command, len(parts), len(body), timeout_s), body)
        # each by itself: a broadcast would have the group's timeout
        for sent in [self._begin(dist.isend, frame, rank) for rank in range(1, self.world_size)]:
            sent.wait(timedelta(seconds=self._patience_s))
        self._patience_s = self._timeout_s
        if len(body) > FRAME_BYTES:
            self._share(_as_tensor(body))

    def next_command(self) -> tuple[Command, list[bytes]]:
        """On a follower: wait for the next command."""
        frame = _empty_frame()
        self._begin(dist.irecv, frame, 0).wait(timedelta(seconds=self._patience_s))
        (command, num_parts, size, timeout_s), body = _unframe(frame)
        self._patience_s = max(timeout_s, self._timeout_s)
        if size > FRAME_BYTES:
            body = bytes(self._share(torch.empty(size, dtype=torch.uint8)).numpy())
        parts, start = [], num_parts * _NUMBER.size
        for (length,) in _NUMBER.iter_unpack(body[:start]):
            parts.append(body[start : start + length])
            start += length
        return Command(command), parts

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, 0, group=self._group)
        return tensor

    def _begin(self, start: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> dist.Work:
        """Begin to send or to receive."""
        work = start(tensor, peer, group=self._group)
        if work is None:
            raise RuntimeError(f"rank {peer} is not in the control group")
        return work

    def send_outcome(self, outcome: RankOutcome) -> None:
        """On a follower: send the outcome of the command."""
        failed = outcome.error is not None
        body = _text_of(outcome.error).encode() if outcome.error is not None else outcome.body
        frame = _frame((failed, 0, len(body), 0.0), body)
        self._begin(dist.isend, frame, 0).wait(timedelta(seconds=self._patience_s))
        if len(body) > FRAME_BYTES:
            dist.send(_as_tensor(body), 0, group=self._group)

    def outcome_of(self, rank: int, timeout_s: float) -> RankOutcome:
        """On rank 0: wait for a follower's outcome.

        Args:
            timeout_s: 0: the group's own timeout.
        Raises: RuntimeError: it is lost, or does not answer in time; the group cannot be used afterwards.
        """
        frame = _empty_frame()
        self._begin(dist.irecv, frame, rank).wait(timedelta(seconds=timeout_s or self._timeout_s))
        (failed, _, size, _), data = _unframe(frame)
        if size > FRAME_BYTES:
            body = torch.empty(size, dtype=torch.uint8)
            dist.recv(body, rank, group=self._group)
            data = bytes(body.numpy())
        return RankOutcome(error=_error_from(data.decode())) if failed else RankOutcome(body=data)


def _lengths(numbers: Iterable[int]) -> bytes:
    return b"".join(_NUMBER.pack(number) for number in numbers)


def _frame(header: tuple[int, int, int, float], body: bytes) -> torch.Tensor:
    """Make the first message: header and body, or the header alone if the body is longer than a frame has room."""
    return _as_tensor((_HEADER.pack(*header) + body[:FRAME_BYTES]).ljust(_HEADER.size + FRAME_BYTES, b"\0"))


def _empty_frame() -> torch.Tensor:
    return torch.empty(_HEADER.size + FRAME_BYTES, dtype=torch.uint8)


def _unframe(frame: torch.Tensor) -> tuple[tuple[int, int, int, float], bytes]:
    """Return a frame's header, and its body if that fits."""
    data = bytes(frame.numpy())
    command, parts, size, patience_s = _HEADER.unpack_from(data)
    return (command, parts, size, patience_s), data[_HEADER.size : _HEADER.size + min(size, FRAME_BYTES)]


def _as_tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _text_of(error: TandemError) -> str:
    """Serialise an error: the reason of its nearest class that every process knows, and the message."""
    known = next((base for base in type(error).__mro__ if base in ERRORS), Internal)
    return f"{known.reason}\n{error}"


def _error_from(text: str) -> TandemError:
    reason, _, message = text.partition("\n")
    classes = {error.reason: error for error in ERRORS}
    return classes.get(reason, Internal)(message)


def run_handler(handlers: Handlers, command: Command, parts: Sequence[bytes]) -> RankOutcome:
    """Run the handler of a command. A TandemError is an outcome; any other exception ends the trainer."""
    if command not in handlers:
        return RankOutcome()
    try:
        return RankOutcome(body=handlers[command](parts))
    except TandemError as error:
        return RankOutcome(error=error)


def follow(wire: Wire, handlers: Handlers) -> None:
    """Execute commands of rank 0 until STOP.

    Raises: RuntimeError: rank 0 is lost; or the exception of a handler, if it is not a TandemError.
    """
    while True:
        try:
            command, parts = wire.next_command()
        except RuntimeError as error:
            raise RuntimeError(f"no command from rank 0, it is lost or hangs: {error}") from error
        wire.send_outcome(run_handler(handlers, command, parts))
        if command is Command.STOP:
            return


class Commander:
    """Issues the commands, on rank 0. Its torch thread calls `run`; `submit` may be called from any thread."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._closed = threading.Lock()
        self._ended = False
        self.current: Command = Command.NOOP

    def submit(
        self, command: Command, parts: Sequence[bytes] = (), timeout_s: float | None = None
    ) -> "Future[list[bytes]]":
        """Queue a command; cancel the future before its turn to withdraw it.

        Args:
            timeout_s: a rank that needs so much longer than rank 0 is lost, and ends the trainer; None: FILES_S where
                ranks read or write, else the group's own timeout.
        Returns: the replies of all ranks, in rank order; or the first TandemError of a rank.
        """
        job = _Job(command=command, parts=parts, timeout_s=timeout_s)
        with self._closed:
            if self._ended:
                job.replies.set_exception(Internal("the trainer has stopped"))
            else:
                self._jobs.put(job)
        return job.replies

    def run(self, wire: Wire, handlers: Handlers) -> None:
        """Execute queued commands until STOP.

        Raises: the exception of a handler, if it is not a TandemError; queued jobs fail then too.
        """
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=HEARTBEAT_S)
                except queue.Empty:
                    job = _Job(command=Command.NOOP)
                # Once it has begun, its caller cannot cancel it: the reply of every rank must be received.
                if not job.replies.set_running_or_notify_cancel():
                    continue
                self._execute(job, wire, handlers)
                if job.command is Command.STOP:
                    return
        finally:
            self._close()

    def _execute(self, job: _Job, wire: Wire, handlers: Handlers) -> None:
        self.current = job.command
        try:
            timeout_s = job.timeout_s or (FILES_S if job.command in _WITH_FILES else 0.0)
            wire.broadcast(job.command, job.parts, timeout_s)
            outcomes = [run_handler(handlers, job.command, job.parts)]
            outcomes += [wire.outcome_of(rank, timeout_s) for rank in range(1, wire.world_size)]
        except BaseException as error:
            job.replies.set_exception(Internal(f"the trainer failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self.current = Command.NOOP
        refusal = _first_error(outcomes)
        if refusal is not None:
            job.replies.set_exception(refusal)
        else:
            job.replies.set_result([outcome.body for outcome in outcomes])

    def _close(self) -> None:
        with self._closed:
            self._ended = True
        while not self._jobs.empty():
            replies = self._jobs.get_nowait().replies
            if replies.set_running_or_notify_cancel():
                replies.set_exception(Internal("the trainer has stopped"))


def _first_error(outcomes: Sequence[RankOutcome]) -> TandemError | None:
    """Choose the error for the caller; it names the rank unless all ranks have the same error."""
    errors = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if not errors:
        return None
    rank, first = errors[0]
    if len(errors) == len(outcomes) and len({str(error) for _, error in errors}) == 1:
        return first
    return type(first)(f"trainer rank {rank}: {first}")
