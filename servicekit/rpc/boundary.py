"""The server's interceptor: maps errors to statuses, counts and times RPCs, and requires deadlines."""

import asyncio
import contextlib
import functools
import inspect
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from servicekit.errors import DeadlineExceeded, InvalidRequest, Overloaded, Status, to_status
from servicekit.logs import get_logger
from servicekit.metrics import RPC_SECONDS, RPC_TOTAL
from servicekit.rpc import limits
from servicekit.rpc.bounds import read_message
from servicekit.rpc.limits import LONGEST_DEADLINE_S, STREAM_SILENCE_S
from servicekit.rpc.request_bounds import check_request
from servicekit.security.run_token import check_token
from servicekit.tracing import served

log = get_logger(__name__)
# Tools and probes call these without a deadline, which is harmless.
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_NO_DEADLINE_NEEDED = (_HEALTH, "grpc.reflection.")

CallerCheck = Callable[[str, list[str]], None]
Admitted = Callable[[str, Any], contextlib.AbstractContextManager[None]]
Holding = Callable[[Any], contextlib.AbstractContextManager[None]]

# Longer than a client takes between two writes of a stream that it has at hand, or in answer to replies; and for all
# that it still writes.
_QUIET_S, _ANSWER_S, _READ_S = 1.0, 0.1, 60.0
# Lines about refused calls of one method and reason, per so many seconds: a client in a loop must not fill the disk.
_LINES, _LINES_S = 10, 60.0


@dataclass(frozen=True)
class MalformedRequest:
    """Represents a request that could not be parsed, for the boundary to answer: gRPC itself would answer UNKNOWN."""

    why: str


class RpcBoundary(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all four kinds of RPC.

    Args:
        check_caller: called with the method and the names in the caller's certificate; raises to refuse the call.
        token: secret of the run that all calls except those of health must carry; "": none.
    """

    def __init__(self, check_caller: CallerCheck | None = None, token: str = "") -> None:
        self._admitted = functools.partial(_admitted, check_caller, token)
        self._calls: Counter[str] = Counter()
        self._bytes = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of a call, or refuse one that is too many; None if the method is not served."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        most = limits.MOST_CALLS_OF.get(method.rpartition("/")[2], limits.MOST_CALLS)
        is_refused = self._calls[method] >= most
        counted = f"{method}, refused" if is_refused else method
        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        self._calls[counted] += 1
        task.add_done_callback(lambda _: self._calls.subtract((counted,)))
        if is_refused:
            error = Overloaded(f"{most} calls of {method} are under way, the most; call again")

            async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
                if self._calls[counted] > limits.MOST_CALLS:  # too many to read what they still send
                    status = status_of(method, error)
                    await context.abort(status.code, status.message, trailing_metadata=status.trailing_metadata)
                raise error

            handler = grpc.stream_stream_rpc_method_handler(refuse)  # it parses no request
        return wrap_handler(handler, method, functools.partial(_wrap, self._admitted, self._holding))

    @contextlib.contextmanager
    def _holding(self, request: Any) -> Iterator[None]:
        """Count a request's bytes in the block, unless it is a stream. Raises: Overloaded: others take the memory."""
        size = request.ByteSize() if isinstance(request, Message) else 0
        if self._bytes and self._bytes + size > limits.MOST_REQUEST_BYTES:
            raise Overloaded(f"requests of {self._bytes} bytes are under way; no room for {size} more, call again")
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size


def wrap_handler(handler: Any, method: str, wrap: Callable[[Any, str, bool], Any]) -> Any:
    """Return the same handler around `wrap(behaviour, method, replies are streamed)`."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = kinds[handler.request_streaming, handler.response_streaming]
    return make(
        wrap(behaviour, method, handler.response_streaming),
        request_deserializer=_lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    # A generated one is a method of the message's class.
    kind = getattr(deserialize, "__self__", None)
    if isinstance(kind, type) and issubclass(kind, Message):
        deserialize = functools.partial(read_message, kind)

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except InvalidRequest as error:
            return MalformedRequest(str(error))
        except DecodeError as error:
            return MalformedRequest(f"{len(data)} bytes that are no request of this method: {error}")

    return read


def checked(request: Any) -> Any:
    """Check that a request, or those of a stream as they are read, are well-formed and within their bounds.

    Raises: InvalidRequest: for a stream, when the request is read.
    """
    if isinstance(request, AsyncIterator):
        return _checked_each(request)
    if isinstance(request, Iterator):
        return map(_checked_one, request)
    return _checked_one(request)


def _checked_one(request: Any) -> Any:
    if isinstance(request, MalformedRequest):
        raise InvalidRequest(request.why)
    check_request(request)
    return request


async def _checked_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    count = 0
    while True:
        try:
            async with asyncio.timeout(STREAM_SILENCE_S):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded(
                f"the stream is silent: {count} messages came, then none for {STREAM_SILENCE_S:g} s; call again"
            ) from None
        count += 1
        yield _checked_one(request)
        del request  # the handler decides how long it lives


def check_deadline(method: str, remaining_s: float | None) -> None:
    """Check the deadline of a call. Raises: InvalidRequest: it has none and its service requires one."""
    if method.lstrip("/").startswith(_NO_DEADLINE_NEEDED):
        return
    if remaining_s is None or remaining_s > LONGEST_DEADLINE_S:
        raise InvalidRequest(f"call of {method} without a deadline; set one (grpcurl: -max-time, buf curl: --timeout)")


def record(method: str, code: str, started_s: float) -> None:
    """Count one finished RPC; `started_s` is from time.perf_counter()."""
    service, _, name = method.lstrip("/").rpartition("/")
    RPC_TOTAL.labels(service, name, code).inc()
    RPC_SECONDS.labels(service, name).observe(time.perf_counter() - started_s)


def status_of(method: str, error: Exception) -> Status:
    """Map a handler's error to its status; an unexpected error is logged with its traceback.

    The frames of handlers are cleared: what they hold, a whole batch, would stay until the collector finds it.
    """
    status = to_status(error)
    if _lines.take(f"{method} {status.reason}"):
        if status.code is grpc.StatusCode.INTERNAL:
            log.error("rpc failed", method=method, error=status.message, exc_info=error)
        else:
            log.info("rpc refused", method=method, code=status.code.name, reason=status.reason, error=status.message)
    clear_frames_of(error)
    return status


class Lines:
    """Limits log lines per kind and period. Not synchronised between threads: a line too many does not matter."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._taken: Counter[str] = Counter()
        self._began_s = time.monotonic()

    def take(self, kind: str) -> bool:
        """Return whether a line of this kind may be written; log the number of suppressed ones, once per period."""
        now_s = time.monotonic()
        if now_s - self._began_s > self._period_s:
            left_out = {name: count - self._most for name, count in self._taken.items() if count > self._most}
            self._taken, self._began_s = Counter(), now_s
            if left_out:
                log.info("more rpcs failed than were logged", period_s=self._period_s, left_out=left_out)
        self._taken[kind] += 1
        return self._taken[kind] <= self._most


_lines = Lines(_LINES, _LINES_S)


def _is_of_present_caller(record: logging.LogRecord) -> bool:
    """Suppress gRPC's error, with a traceback, about a reply whose caller has disconnected.

    gRPC logs none if it knows of that before the reply fails, so impatient callers cause a few in ten thousand calls.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ != "ExecuteBatchError" or not str(error).startswith('Failed "execute_batch"'):
        return True
    if _lines.take("caller gone"):
        log.info("reply not sent, caller disconnected", grpc=record.getMessage())
    return False


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_present_caller)


@contextlib.contextmanager
def _admitted(check_caller: CallerCheck | None, token: str, method: str, context: Any) -> Iterator[None]:
    """Check whether a call may be served, then hold its span open. Raises: TandemError: it may not."""
    if token and not method.lstrip("/").startswith(_HEALTH):
        check_token(token, method, context.invocation_metadata())
    if check_caller is not None:
        check_caller(method, _names(context))
    check_deadline(method, context.time_remaining())
    with served(method, context.invocation_metadata()):
        yield


async def _read_to_end(requests: AsyncIterator[Any], quiet_s: float) -> None:
    """Read what the client still sends before the call fails.

    An asyncio client that writes to a call that has ended reports "INTERNAL: Internal error from Core" instead of the
    status (https://github.com/grpc/grpc/issues/36066), so a malformed sample in a train step would look like a bug. A
    client that waits for a reply before it writes gets the status after a pause of `quiet_s`; one that never ends
    after _READ_S.
    """
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(_READ_S):
            while True:
                async with asyncio.timeout(quiet_s):
                    await anext(requests)


def _names(context: grpc.aio.ServicerContext) -> list[str]:
    """Return the DNS names in the certificate of the caller, which the handshake has verified."""
    return [name.decode("utf-8", errors="replace") for name in context.auth_context().get("peer_dns", ())]


def _set_code(context: grpc.aio.ServicerContext) -> str:
    """Return the name of the status that the handler itself has set, OK by default."""
    code = context.code()
    name: str = code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.OK.name
    return name


def _wrap(admitted: Admitted, holding: Holding, behaviour: Any, method: str, streams_replies: bool) -> Any:
    answer = _answer(behaviour, method)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        started_s = time.perf_counter()
        code = grpc.StatusCode.CANCELLED.name  # what remains if the task is cancelled
        try:
            try:
                with admitted(method, context), holding(request):
                    reply = await answer(checked(request), context)
                code = _set_code(context)
                return reply
            except grpc.aio.AbortError as error:
                code = _set_code(context)
                clear_frames_of(error)
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of the RPC's task
                status = status_of(method, error)
                code = status.code.name
            # Not inside of the except block: gRPC keeps the AbortError, which would keep the handler's error.
            if isinstance(request, AsyncIterator):
                await _read_to_end(request, _ANSWER_S if streams_replies else _QUIET_S)
            await context.abort(status.code, status.message, trailing_metadata=status.trailing_metadata)
        finally:
            record(method, code, started_s)
            if isinstance(request, AsyncIterator):
                await _close(request)
            # The AbortError is in gRPC's state of this call, which `context` holds: a cycle through this frame.
            del request, context

    return call


def _answer(behaviour: Any, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a coroutine function that answers; one whose replies are streamed writes them itself."""
    if inspect.iscoroutinefunction(behaviour):
        coroutine: Callable[[Any, Any], Awaitable[Any]] = behaviour
        return coroutine

    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        if not inspect.isasyncgenfunction(behaviour):
            raise NotImplementedError(f"{method} is not implemented here (as an async method)")
        async with contextlib.aclosing(behaviour(request, context)) as replies:
            async for reply in replies:
                await context.write(reply)

    return write


async def _close(requests: AsyncIterator[Any]) -> None:
    """End a stream that was not read to its end: gRPC's reader and its generator hold each other, and a message."""
    generator: Any = aiter(requests)
    with contextlib.suppress(Exception):
        await generator.aclose()


def clear_frames_of(error: BaseException) -> None:
    """Clear the locals of the frames that an error came through, and its causes; those that still run keep theirs."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
