"""Follows a run from outside: which services are up (registry), then the coordinator's events."""

import asyncio
import time
from collections.abc import Callable

import grpc

from launcher.view.run_view import RunView
from servicekit.errors import TandemError
from servicekit.redis.records import COORDINATOR, PAGE_URL
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import operator_identity
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc

# Announcements take seconds of imports; a fifth of a second later is soon enough to tell.
_POLL_S = 0.2
_RECONNECT_S = 0.2
# The proto's longest deadline; when it is over, the stream is asked for again.
_WATCH_TIMEOUT_S = 86400.0


async def follow(
    redis_url: str,
    run_id: str,
    roles: dict[str, list[str]],
    view: RunView,
    on_address: Callable[[str], None],
    token: str,
) -> None:
    """Show the run in `view` until its event stream ends.

    Args:
        roles: names to expect by role, the coordinator's among them.
        on_address: called with the coordinator's address once it is known.
        token: the run's.
    """
    registry = await asyncio.to_thread(Registry, redis_url, run_id)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    arrivals = asyncio.create_task(_watch_arrivals(registry, roles, view, address), name="watch registry")
    try:
        await _show_events(registry, await address, view, on_address, token)
    finally:
        arrivals.cancel()
        await asyncio.gather(arrivals, return_exceptions=True)
        await asyncio.to_thread(registry.close)


async def _watch_arrivals(
    registry: Registry, roles: dict[str, list[str]], view: RunView, address: asyncio.Future[str]
) -> None:
    """Say who is up, as they come; ends when all are."""
    started = time.monotonic()
    missing = {(role, name) for role, names in roles.items() for name in names}
    shown: set[tuple[str, str]] = set()
    while missing:
        if missing != shown:  # only then: the coordinator's events say meanwhile what else is going on
            shown = set(missing)
            view.doing("waiting for " + ", ".join(sorted(name for _, name in missing)))
        for role in sorted({role for role, _ in missing}):
            try:
                records = await asyncio.to_thread(registry.list, role)
            except TandemError:
                continue  # the services notice a lost Redis themselves; their end is what counts
            for record in records:
                if (role, record.name) in missing:
                    missing.discard((role, record.name))
                    view.ready(record.name, time.monotonic() - started)
                if role == COORDINATOR and not address.done():
                    address.set_result(record.address)
                    await _say_page(registry, view)
        await asyncio.sleep(_POLL_S)


async def _say_page(registry: Registry, view: RunView) -> None:
    """The coordinator has set the address before it announced itself."""
    url = await asyncio.to_thread(registry.get_value, PAGE_URL)
    if url is not None:
        view.say(f"  the run's page: {url}")


async def _show_events(
    registry: Registry, address: str, view: RunView, on_address: Callable[[str], None], token: str
) -> None:
    """Until the stream of a coordinator ends.

    One that was killed stays announced until its lease has run out, so `address` may be that of the last one: where
    nobody answers, the registry is asked again. Another coordinator's events are numbered from 1 again.
    """
    sequence = 0
    on_address(address)
    while True:
        sequence, is_over = await _show_stream(address, sequence, view, token)
        if is_over:
            return
        # Restarting or gone: the process table tells the two apart and ends this task.
        await asyncio.sleep(_RECONNECT_S)
        moved = await _address_now(registry, address)
        if moved != address:
            address, sequence = moved, 0
            on_address(address)


async def _show_stream(address: str, sequence: int, view: RunView, token: str) -> tuple[int, bool]:
    """Events after `sequence`. Returns: the last one's number, and whether the stream has ended, not just broken."""
    async with open_channel(address, identity=operator_identity(), peer=COORDINATOR, token=token) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        try:
            request = pb.WatchEventsRequest(after_sequence=sequence)
            async for event in stub.WatchEvents(request, timeout=_WATCH_TIMEOUT_S):
                sequence = event.sequence
                show_event(event, view)
        except grpc.aio.AioRpcError:
            return sequence, False
    return sequence, True


async def _address_now(registry: Registry, last: str) -> str:
    """Where the coordinator is announced; `last` if it is not, or Redis does not say."""
    try:
        records = await asyncio.to_thread(registry.list, COORDINATOR)
    except TandemError:
        return last
    return records[0].address if records else last


def show_event(event: pb.WatchEventsResponse, view: RunView) -> None:
    """One event of the coordinator, in the view's terms."""
    if event.kind == pb.EVENT_KIND_ITERATION:
        view.iteration(dict(event.values))
    elif event.kind == pb.EVENT_KIND_WARNING:
        view.warning(event.message)
    elif event.kind == pb.EVENT_KIND_PROGRESS:
        view.doing(event.message)
    elif event.kind == pb.EVENT_KIND_EVALUATION and not event.values.get("iteration"):
        # Later evaluations are a column of their iteration's line.
        view.say(event.message)
    elif event.kind == pb.EVENT_KIND_STATE:
        view.say(event.message, "bold")
