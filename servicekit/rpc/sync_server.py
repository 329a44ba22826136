"""A threaded gRPC server with the same error mapping, for processes whose main thread is SGLang's."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from servicekit.rpc.boundary import check_deadline, checked, record, status_of, wrap_handler
from servicekit.rpc.limits import SERVER_OPTIONS
from servicekit.rpc.server import bind_address


def start_sync_server(
    add_servicer: Callable[..., Any], servicer: object, address: str, max_workers: int = 4
) -> grpc.Server:
    """Serve `servicer` (plain methods) on `unix:/path.sock` or `host:port` until `.stop(grace_s)`.

    Raises: ConfigError: the address cannot be bound.
    """
    server = grpc.server(
        ThreadPoolExecutor(max_workers, thread_name_prefix="rpc"),
        interceptors=(_SyncBoundary(),),
        options=SERVER_OPTIONS,
    )
    add_servicer(servicer, server)
    bind_address(server, address)
    server.start()
    return server


class _SyncBoundary(grpc.ServerInterceptor):
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = continuation(handler_call_details)
        return None if handler is None else wrap_handler(handler, handler_call_details.method, _wrap)


def _wrap(behaviour: Any, method: str, streams_replies: bool) -> Any:
    def single(request: Any, context: grpc.ServicerContext) -> Any:
        with _boundary(method, request, context):
            return behaviour(checked(request), context)

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _boundary(method, (), context):  # waiting for more requests might wait for a client that waits for us
            yield from behaviour(checked(request), context)

    return stream if streams_replies else single


@contextlib.contextmanager
def _boundary(method: str, request: Any, context: grpc.ServicerContext) -> Iterator[None]:
    started_s = time.perf_counter()
    code = grpc.StatusCode.CANCELLED.name  # what remains if the client hangs up on a stream
    try:
        check_deadline(method, context.time_remaining())
        yield
        code = grpc.StatusCode.OK.name
    except Exception as error:  # the boundary of the RPC's thread
        if isinstance(context.code(), grpc.StatusCode):  # the handler has called context.abort() itself
            code = context.code().name
            raise
        status = status_of(method, error)
        code = status.code.name
        if isinstance(request, Iterator):
            collections.deque(request, maxlen=0)  # see rpc_boundary: a client that still writes would not hear us
        context.set_trailing_metadata(status.trailing_metadata)
        context.abort(status.code, status.message)
    finally:
        record(method, code, started_s)
