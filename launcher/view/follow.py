"""Follows a run: services as they appear in the registry, then the events of the coordinator."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from launcher.view.run_view import RunView
from servicekit.errors import TandemError
from servicekit.lifecycle.tasks import cancel
from servicekit.redis.records import COORDINATOR, PAGE_URL
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from servicekit.security.run_token import key_part, page_key
from servicekit.security.tls import operator_identity
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc
from tandem_config.schema import RunConfig
from tandem_files.metrics_file import METRICS_FILE
from tandem_files.metrics_table import ACCURACY
from tandem_files.run_folder import LauncherNotes, read_token, write_notes

# Services take seconds to start, so a fifth of a second more does not show.
_POLL_S = 0.2
_RECONNECT_S = 0.2
# Engines take minutes to load large models: a log without a line for longer looks like a hang.
_REMIND_S = 15.0
# The longest deadline that the proto allows; then the stream is opened again.
_WATCH_TIMEOUT_S = 86400.0
# How long the last events may take to arrive after the coordinator has ended.
_LAST_EVENTS_S = 3.0


@dataclass(kw_only=True)
class Follower:
    """Shows a run in `view` until its event stream ends."""

    registry: Registry
    roles: Mapping[str, Sequence[str]]  # expected services, by role; the coordinator is one of them
    view: RunView
    on_address: Callable[[str], None]  # called with the coordinator's address when it is known, and when it changes
    token: str  # secret of the run
    remind_s: float = _REMIND_S  # seconds after which the services that are still missing are named again

    async def follow(self) -> None:
        """Show the run; closes the registry."""
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        arrivals = asyncio.create_task(self._watch_arrivals(address), name="watch registry")
        try:
            await self._show_events(await address)
        finally:
            await cancel(arrivals)
            await asyncio.to_thread(self.registry.close)

    async def _watch_arrivals(self, address: asyncio.Future[str]) -> None:
        """Show services as they are announced, until all are; name the missing ones again and again."""
        started = reminded = time.monotonic()
        missing, arrived = self._expected(), set[tuple[str, str]]()
        shown: set[tuple[str, str]] = set()
        while missing:
            if missing != shown:  # else this would overwrite the coordinator's progress events
                shown = set(missing)
                self.view.doing(_waiting(missing))
            for role in sorted({role for role, _ in missing}):
                try:
                    records = await asyncio.to_thread(self.registry.list, role)
                except TandemError:
                    continue  # the services handle an unreachable Redis; their exit is what the launcher acts on
                for record in records:
                    if (role, record.name) in missing:
                        arrived.add((role, record.name))
                        self.view.ready(record.name, time.monotonic() - started)
                    if role == COORDINATOR and not address.done():
                        address.set_result(record.address)
                        await self._show_page_url()
            missing = self._expected() - arrived  # whose number may have changed
            if missing and (now := time.monotonic()) - reminded >= self.remind_s:
                reminded = now
                self.view.print_line(f"  {_waiting(missing)}: {now - started:.0f} s", "dim")
            await asyncio.sleep(_POLL_S)

    def _expected(self) -> set[tuple[str, str]]:
        return {(role, name) for role, names in self.roles.items() for name in names}

    async def _show_page_url(self) -> None:
        """Show the URL of the run's page, which the coordinator publishes before it announces itself, with its key."""
        url = await asyncio.to_thread(self.registry.get_value, PAGE_URL)
        if url is not None:
            self.view.print_line(f"  the run's page: {url}{key_part(page_key(self.token))}")

    async def _show_events(self, address: str) -> None:
        """Show events until the stream of a coordinator ends.

        A coordinator that was killed stays announced until its lease expires, so `address` may be stale: if it does not
        answer, the registry is asked again. The events of another coordinator are numbered from 1 again.
        """
        sequence = 0
        self.on_address(address)
        while True:
            sequence, is_over = await self._show_stream(address, sequence)
            if is_over:
                return
            # It restarts or has ended: the launcher, which waits for its process, ends this task then.
            await asyncio.sleep(_RECONNECT_S)
            moved = await self._address_now(address)
            if moved != address:
                address, sequence = moved, 0
                self.on_address(address)

    async def _show_stream(self, address: str, sequence: int) -> tuple[int, bool]:
        """Show the events after `sequence`. Returns: the last one's number; whether the stream ended or only broke."""
        async with open_channel(address, identity=operator_identity(), peer=COORDINATOR, token=self.token) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            try:
                request = pb.WatchEventsRequest(after_sequence=sequence)
                async for event in stub.WatchEvents(request, timeout=_WATCH_TIMEOUT_S):
                    sequence = event.sequence
                    show_event(event, self.view)
            except grpc.aio.AioRpcError:
                return sequence, False
        return sequence, True

    async def _address_now(self, last: str) -> str:
        """Ask for the coordinator's address; `last` if it is not announced or the registry is unreachable."""
        try:
            records = await asyncio.to_thread(self.registry.list, COORDINATOR)
        except TandemError:
            return last
        return records[0].address if records else last


def _waiting(missing: set[tuple[str, str]]) -> str:
    return "waiting for " + ", ".join(sorted(name for _, name in missing))


def show_event(event: pb.WatchEventsResponse, view: RunView) -> None:
    """Show one event of the coordinator."""
    if event.kind == pb.EVENT_KIND_ITERATION:
        view.iteration(dict(event.values))
    elif event.kind == pb.EVENT_KIND_WARNING:
        view.warning(event.message)
    elif event.kind == pb.EVENT_KIND_PROGRESS and event.message:  # else a part has ended
        view.doing(event.message)
    elif event.kind == pb.EVENT_KIND_EVALUATION:
        # After the first one the held-out accuracy is a column of its iteration's line.
        if not event.values.get("iteration") or ACCURACY not in event.values:
            view.print_line(event.message)
    elif event.kind == pb.EVENT_KIND_STATE:
        view.print_line(event.message, "bold")


class ViewTask:
    """Shows a running run, and notes the coordinator's address in the run's folder, for `tandem status`.

    Args:
        launch_id: name of the run in Redis.
    """

    def __init__(self, config: RunConfig, run_dir: Path, launch_id: str, redis_url: str, view: RunView) -> None:
        self._run_dir, self._launch_id, self._redis_url, self._view = run_dir, launch_id, redis_url, view
        self._roles: dict[str, Sequence[str]] = {
            "trainer": ["trainer"],
            COORDINATOR: [COORDINATOR],
        }
        self.expect(config.rollout.replicas)
        self._notes = LauncherNotes(pid=os.getpid(), run_id=launch_id)
        self._task: asyncio.Task[None] | None = None
        self._found_coordinator = False

    def expect(self, replicas: int) -> None:
        """Wait for so many replicas from now on, where services are waited for."""
        self._roles["rollout"] = [f"rollout-{index}" for index in range(replicas)]

    async def begin(self) -> None:
        """Show the run from its first event on; call it again when another coordinator starts."""
        await self.cancel()
        write_notes(self._run_dir, self._notes)
        self._task = asyncio.create_task(self._watch(), name="watch the run")

    async def finish(self) -> None:
        """Show the last events of a run that is over, and stop."""
        if self._task is not None and self._found_coordinator:
            await asyncio.wait([self._task], timeout=_LAST_EVENTS_S)
        await self.cancel()

    async def cancel(self) -> None:
        """Stop showing the run."""
        task, self._task = self._task, None
        if task is not None:
            await cancel(task)

    async def _watch(self) -> None:
        """Follow the run; a failure of the view becomes a warning."""
        try:
            await Follower(
                token=read_token(self._run_dir),
                registry=await asyncio.to_thread(Registry, self._redis_url, self._launch_id),
                roles=self._roles,
                view=self._view,
                on_address=self._note_coordinator,
            ).follow()
        except Exception as error:  # noqa: BLE001 - a failure of the view must not end the run
            rows = self._run_dir / METRICS_FILE
            self._view.warning(f"the progress view failed: {error}; the run continues, see {rows}")

    def _note_coordinator(self, address: str) -> None:
        self._found_coordinator = True
        write_notes(self._run_dir, LauncherNotes(**{**vars(self._notes), "coordinator": address}))
