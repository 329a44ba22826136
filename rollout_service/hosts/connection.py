"""The leader's connection to one worker: find it, join it, and send it beats until one of them ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollout_service.hosts.host_ranks import HostRanks, worker_name
from servicekit.errors import Aborted, DeadlineExceeded, TandemError, Unavailable, rpc_errors
from servicekit.logs import get_logger
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import DeadlineChannel, open_channel
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import worker_pb2 as pb
from tandem_api.rollout.v1 import worker_pb2_grpc

log = get_logger(__name__)

WORKER_ROLE = "rollout-worker"
CALL_S = 5.0
RETRY_S = 0.25
# How long to wait for a worker's report of a lost rank; it notices one within milliseconds.
BLAME_S = 2.0
# Limit of the reason in a LeaveRequest: an error's text may be of any length.
REASON_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class Leader:
    """One start of a replica's leader, as its workers see it.

    Attributes:
        leader_id: unique per start.
        name: of the replica.
        share: the leader's own ranks.
        store: `host:port` of the TCP store where SGLang's ranks meet.
    """

    leader_id: str
    name: str
    share: HostRanks
    store: str
    ttl_s: float
    identity: Identity | None


class WorkerConnection:
    """The connection to one worker."""

    def __init__(self, leader: Leader, host: int, record: ServiceRecord) -> None:
        self.host = host
        self.title = f"host {host} of {leader.name} ({record.name} at {record.address})"
        self._leader_id = leader.leader_id
        self._ttl_s = leader.ttl_s
        self.channel: DeadlineChannel = open_channel(record.address, identity=leader.identity, peer="rollout")
        self.stub = worker_pb2_grpc.RolloutWorkerServiceStub(self.channel)

    async def join(self, leader: Leader) -> None:
        """Join the worker to the leader.

        Raises: Unavailable: it does not answer; Aborted: it belongs to another leader; InvalidRequest: it is
            configured for another engine.
        """
        request = pb.JoinRequest(
            leader_id=leader.leader_id,
            replica=leader.name,
            nodes=leader.share.nodes,
            tensor_parallel=leader.share.tensor_parallel,
            host=self.host,
            store_address=leader.store,
            settings=leader.share.settings,
        )
        with rpc_errors(self.title):
            await self.stub.Join(request, timeout=CALL_S)

    async def keep(self, on_stop: Callable[[], None]) -> None:
        """Send beats for as long as the worker can serve.

        Args:
            on_stop: called when the worker was asked to stop.
        Raises: Unavailable: it is lost, was restarted, or can no longer serve.
        """
        loop = asyncio.get_running_loop()
        last_beat_s = loop.time()
        while True:
            try:
                reply = await self._beat(min(CALL_S, self._ttl_s / 3))
            except Aborted as error:
                raise Unavailable(str(error)) from None
            except TandemError as error:
                if loop.time() - last_beat_s > self._ttl_s:
                    raise Unavailable(f"{self.title} is lost: no answer for {self._ttl_s:g} s ({error})") from None
            else:
                last_beat_s = loop.time()
                if reply.failure:
                    raise Unavailable(f"{self.title}: {reply.failure}")
                if reply.asked_to_stop:
                    on_stop()
            await asyncio.sleep(beat_s(self._ttl_s))

    async def trouble(self) -> str:
        """Return what is wrong with the worker; "" after BLAME_S if nothing is. For when our own ranks have failed."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BLAME_S
        while True:
            try:
                reply = await self._beat(BLAME_S)
            except TandemError as error:
                return f"{self.title} is lost ({error})"
            if reply.failure:
                return f"{self.title}: {reply.failure}"
            if loop.time() > deadline_s:
                return ""
            await asyncio.sleep(RETRY_S)

    async def leave(self, reason: str, *, failed: bool) -> None:
        """Send Leave; a worker that does not receive it ends by itself once our beats stop."""
        try:
            with rpc_errors(self.title):
                request = pb.LeaveRequest(leader_id=self._leader_id, reason=reason[:REASON_CHARS], failed=failed)
                await self.stub.Leave(request, timeout=CALL_S)
        except TandemError as error:
            log.info("worker ignored Leave", error=str(error))

    async def _beat(self, timeout_s: float) -> pb.BeatResponse:
        with rpc_errors():
            response: pb.BeatResponse = await self.stub.Beat(
                pb.BeatRequest(leader_id=self._leader_id), timeout=timeout_s
            )
            return response


def beat_s(ttl_s: float) -> float:
    """Seconds between two beats."""
    return min(1.0, ttl_s / 5)


async def join_worker(leader: Leader, host: int, registry: Registry, timeout_s: float) -> WorkerConnection:
    """Look for the worker of one host until it has joined.

    Raises: DeadlineExceeded: naming the host, and why it did not join; InvalidRequest: it is configured for another
        engine.
    """
    name = worker_name(leader.name, host)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    why = ""
    while asyncio.get_running_loop().time() < deadline_s:
        try:
            record = await asyncio.to_thread(_find, registry, name)
            return await _joined(leader, host, record)
        except (Unavailable, Aborted, DeadlineExceeded) as error:
            why = str(error)
        await asyncio.sleep(RETRY_S)
    raise DeadlineExceeded(
        f"host {host} of {leader.name} did not join within {timeout_s:g} s (a rollout_service with "
        f"TANDEM_HOST_INDEX={host}): {why}"
    )


def _find(registry: Registry, name: str) -> ServiceRecord:
    for record in registry.list(WORKER_ROLE):
        if record.name == name:
            return record
    failures = [str(failure) for failure in registry.failures() if (failure.role, failure.name) == (WORKER_ROLE, name)]
    raise Unavailable("; ".join([f"no {name} in the registry", *failures]))


async def _joined(leader: Leader, host: int, record: ServiceRecord) -> WorkerConnection:
    worker = WorkerConnection(leader, host, record)
    try:
        await worker.join(leader)
    except BaseException:
        await worker.channel.close()
        raise
    log.info("worker joined", worker=worker.title)
    return worker
