"""The error vocabulary: one class per way to fail, each with its gRPC status and a reason code.

The status follows from what the caller should do: repeat this call -> UNAVAILABLE; restart the transfer -> ABORTED; fix
the state first -> FAILED_PRECONDITION; fix the request -> INVALID_ARGUMENT. The reason is sent in the trailing metadata
(`tandem-reason`), so that a client raises the class that the server raised.
"""

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from typing import Any, ClassVar

import grpc

REASON_KEY = "tandem-reason"
# gRPC's own key (proposal A6): a client whose channel repeats calls waits for so long.
RETRY_KEY = "grpc-retry-pushback-ms"
_LONGEST_S = 3600.0
# Begin of the text with which gRPC itself refuses calls that no server has taken yet.
_PENDING = "Too many pending requests"
# A status message is percent-encoded (up to three bytes per byte) in HTTP/2 trailers, of which peers accept 8 KiB by
# default; the rest of the trailers needs room too.
MAX_MESSAGE_TEXT_BYTES = 2000


class TandemError(Exception):
    """An error for the caller, with status and reason; `str(error)` is the message."""

    # Seconds after which the service wants the call again, no sooner; 0: it does not say.
    after_s = 0.0
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, code: grpc.StatusCode | None = None, reason: str = "") -> None:
        """Take status and reason of a class; what is left out is as in its base."""
        cls.code, cls.reason = code or cls.code, reason or cls.reason


class InvalidRequest(TandemError, code=grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_REQUEST"):
    """The request can never succeed as it is."""


class ConfigError(TandemError, code=grpc.StatusCode.INVALID_ARGUMENT, reason="CONFIG"):
    """The configuration or the environment is wrong; nothing was started."""


class NotReady(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="NOT_READY"):
    """The service is not in a state to do this yet (no weights, still starting)."""


class StaleVersion(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="STALE_VERSION"):
    """An older policy version was asked for than the service has."""


class WrongVersion(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="WRONG_VERSION"):
    """The request names another policy version than the current one."""


class PhaseOrder(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="PHASE_ORDER"):
    """A phase of a weight-sync round came out of order."""


class Poisoned(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="POISONED"):
    """Weights were partly written; only a full sync helps."""


class Fenced(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="FENCED"):
    """The caller no longer leads the run: a newer coordinator has taken over. The caller must end without changes."""


class ReleaseSkew(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="RELEASE_SKEW"):
    """The services of a run are of different releases; it may pass while the run is being upgraded."""


class ConfigurationSkew(TandemError, code=grpc.StatusCode.FAILED_PRECONDITION, reason="CONFIGURATION_SKEW"):
    """The services of a run have read different configurations; it passes when the ones with the old are restarted."""


class AlreadyExists(TandemError, code=grpc.StatusCode.ALREADY_EXISTS, reason="ALREADY_EXISTS"):
    """Another process holds the name."""


class NotFound(TandemError, code=grpc.StatusCode.NOT_FOUND, reason="NOT_FOUND"):
    """What is asked for is not here: begin it again."""


class TooLarge(TandemError, code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="TOO_LARGE"):
    """A message or a batch is over its limit."""


class Unavailable(TandemError, code=grpc.StatusCode.UNAVAILABLE, reason="UNAVAILABLE"):
    """The peer is unreachable; the same call may be repeated."""


class Overloaded(Unavailable, code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="OVERLOADED"):
    """The service has as much to do as it takes; nothing was done of this call, which may be repeated later."""

    after_s = 1.0


class Aborted(TandemError, code=grpc.StatusCode.ABORTED, reason="ABORTED"):
    """The transaction was given up; start a new one."""


class PeerLost(TandemError, code=grpc.StatusCode.ABORTED, reason="PEER_LOST"):
    """A participant of a collective operation is lost."""


class SlotTaken(Aborted, reason="SLOT_TAKEN"):
    """Another process holds the rank's slot in the weight group: the rank takes it again, or it ends."""


class DigestMismatch(TandemError, code=grpc.StatusCode.DATA_LOSS, reason="DIGEST_MISMATCH"):
    """Bytes that were installed are not the bytes that were sent."""


class DeadlineExceeded(TandemError, code=grpc.StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """A wait has exceeded its deadline; the message names what was waited for."""


class NotFinite(TandemError, code=grpc.StatusCode.OUT_OF_RANGE, reason="NOT_FINITE"):
    """A loss, a gradient or a weight is NaN or infinite."""


class PermissionDenied(TandemError, code=grpc.StatusCode.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """The operation is switched off here."""


class Unauthenticated(TandemError, code=grpc.StatusCode.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """The caller has not shown that it belongs to the run."""


class Internal(TandemError, code=grpc.StatusCode.INTERNAL, reason="INTERNAL"):
    """A bug, or an unexpected error."""


# All classes above, in their order.
ERRORS: tuple[type[TandemError], ...] = tuple(
    one for one in list(globals().values()) if isinstance(one, type) and issubclass(one, TandemError)
)[1:]
_BY_REASON = {error.reason: error for error in ERRORS}
# For statuses without a reason (of gRPC itself or of a proxy): the first class with that status.
_BY_CODE = {error.code: error for error in reversed(ERRORS)} | {grpc.StatusCode.CANCELLED: Aborted}

# Texts of gRPC and BoringSSL at the end that refuses. The refused end gets only "Socket closed".
_HANDSHAKE = {
    "Hostname Verification Check failed": "the peer's certificate is for another name than that of its role",
    "certificate has expired": "the peer's certificate has expired, or this machine's clock is wrong",
    "unable to get local issuer certificate": ("the peer's certificate is not of a trusted authority (TANDEM_TLS_CA)"),
    "WRONG_VERSION_NUMBER": "the peer speaks no TLS, and TANDEM_TLS_CERT is set here",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The wire form of an error."""

    code: grpc.StatusCode
    reason: str
    message: str
    after_s: float = 0.0

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata with the reason code, and when the call may be repeated."""
        again = ((RETRY_KEY, f"{1000 * self.after_s:.0f}"),) if self.after_s else ()
        return ((REASON_KEY, self.reason), *again)


def to_status(error: BaseException) -> Status:
    """Map any exception to its status.

    The error of a call that the handler itself made keeps its status and reason.
    """
    if isinstance(error, grpc.RpcError):
        error = from_rpc_error(error)
    if isinstance(error, TandemError):
        return Status(code=error.code, reason=error.reason, message=_cut(str(error)), after_s=error.after_s)
    if isinstance(error, NotImplementedError):
        return Status(code=grpc.StatusCode.UNIMPLEMENTED, reason="UNIMPLEMENTED", message=_cut(str(error)))
    if isinstance(error, ValueError):
        return Status(code=InvalidRequest.code, reason=InvalidRequest.reason, message=_cut(str(error)))
    if isinstance(error, TimeoutError):
        message = _cut(str(error)) or "a wait inside the service has exceeded its deadline"
        return Status(code=DeadlineExceeded.code, reason=DeadlineExceeded.reason, message=message)
    return Status(code=Internal.code, reason=Internal.reason, message=_cut(f"{type(error).__name__}: {error}"))


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """Make the error that the server raised, by its reason, or by its status if the reason is missing or unknown."""
    call: Any = error  # gRPC's runtime errors are Calls as well; the base class declares nothing
    code, details = call.code(), _explain_handshake(call.details() or "")
    said = dict(call.trailing_metadata() or ())
    found = (
        Overloaded if details.startswith(_PENDING) else _BY_REASON.get(said.get(REASON_KEY, "")) or _BY_CODE.get(code)
    )
    if found is None:
        return Internal(f"{code.name}: {details}")
    made = found(details or code.name)
    if (asked_ms := said.get(RETRY_KEY, "")).isdigit():
        made.after_s = min(int(asked_ms) / 1000, _LONGEST_S)
    return made


# Note of an OSError that a write has raised.
WRITING = "while writing"
_PART = "part: "
_NO_ROOM, _NO_RIGHT = "make room there, then resume", "let this user write there, then resume"
_ADVICE = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EROFS: "mount it for writing, then resume",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EIO: "look at its disk, then resume",
    errno.ENOENT: "was it removed? restore it, then resume",
}


@contextlib.contextmanager
def in_part(name: str) -> Iterator[None]:
    """Note in errors of the block which part of the process they are of, for `describe`; the innermost part counts."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith(_PART) for note in _notes(error)):
            error.add_note(f"{_PART}{name}")
        raise


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def is_known(error: BaseException) -> bool:
    """Whether the message of an error says all that there is to say, so that its traceback adds nothing."""
    return isinstance(error, TandemError) or (isinstance(error, OSError) and error.filename is not None)


def describe(error: BaseException, *, advise: bool = True) -> str:
    """Describe an error to the user in a line: its part of the process, what happened, what to do about it.

    Args:
        advise: say what to do about files and disks.

    >>> with contextlib.suppress(KeyError), in_part("reward length"):
    ...     raise (caught := KeyError("level"))
    >>> describe(caught)
    "reward length: KeyError: 'level'"
    """
    text = _what(error)
    part = next((note.removeprefix(_PART) for note in _notes(error) if note.startswith(_PART)), "")
    if part.lower() not in text.partition(":")[0].lower():
        text = f"{part}: {text}"
    causes = _causes(error) if advise else ()
    advice = (_ADVICE[cause.errno] for cause in causes if isinstance(cause, OSError) and cause.errno in _ADVICE)
    return next((f"{text} ({what})" for what in advice), text)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes; they may form a ring, where an error is raised again from one that it caused."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _what(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        verb = "write" if WRITING in _notes(error) or _ADVICE.get(error.errno or 0) == _NO_ROOM else "use"
        return f"cannot {verb} {error.filename}: {error.strerror}"
    if isinstance(error, grpc.RpcError) and hasattr(error, "code"):
        error = from_rpc_error(error)
    kind = type(error).__name__
    if isinstance(error, MemoryError):
        return f"{kind}: this process is out of memory"
    if isinstance(error, TandemError):
        return str(error) or kind
    return " ".join(f"{kind}: {error}".split()) if str(error) else kind


@contextlib.contextmanager
def rpc_errors(peer: str = "") -> Iterator[None]:
    """Turn gRPC errors inside a `with` block into TandemErrors; `peer` ("rollout-0") is put before the message.

    A channel that another task closes, because the peer is lost, cancels its calls without the task's own cancellation.
    """
    try:
        with in_part(peer) if peer else contextlib.nullcontext():
            yield
    except (asyncio.CancelledError, grpc.aio.UsageError) as error:
        if not _is_of_closed_channel(error):
            raise
        raise Unavailable(f"{peer}: our connection to it was closed: it is lost") from error
    except grpc.RpcError as error:
        raise _of_peer(peer, from_rpc_error(error)) from error  # in no name here: its traceback has this frame


def _of_peer(peer: str, error: TandemError) -> TandemError:
    error.args = (f"{peer}: {error}" if peer else str(error),)
    return error


def _is_of_closed_channel(error: BaseException) -> bool:
    if not isinstance(error, asyncio.CancelledError):
        return "closed" in str(error)
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def _explain_handshake(details: str) -> str:
    """Explain gRPC's message of a failed TLS handshake."""
    for mark, meaning in _HANDSHAKE.items():
        if mark in details:
            return f"{meaning} ({details})"
    return details


def _cut(message: str) -> str:
    encoded = message.encode("utf-8", errors="replace")
    if len(encoded) <= MAX_MESSAGE_TEXT_BYTES:
        return message
    kept = encoded[:MAX_MESSAGE_TEXT_BYTES].decode("utf-8", errors="ignore")
    return f"{kept}... ({len(encoded) - MAX_MESSAGE_TEXT_BYTES} bytes more in the server's log)"
