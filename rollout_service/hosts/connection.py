"""The leader's side of the bond with one worker: finding it, joining it, and hearing from it until one of them ends."""

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
# A worker that has lost a rank notices within milliseconds; its word for it is waited for this long.
BLAME_S = 2.0
# Of why we leave: an error's text may be of any length.
REASON_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Who joins: a start of the leader of replica `name`; share: its own; store: where SGLang's ranks meet."""

    leader_id: str
    name: str
    share: HostRanks
    store: str
    ttl_s: float
    identity: Identity | None


class WorkerConnection:
    """One worker that belongs to us."""

    def __init__(self, leader: Leader, host: int, record: ServiceRecord) -> None:
        self.host = host
        self.title = f"host {host} of {leader.name} ({record.name} at {record.address})"
        self._leader_id = leader.leader_id
        self._ttl_s = leader.ttl_s
        self.channel: DeadlineChannel = open_channel(record.address, identity=leader.identity, peer="rollout")
        self.stub = worker_pb2_grpc.RolloutWorkerServiceStub(self.channel)

    async def join(self, leader: Leader) -> None:
        """Raises: Unavailable: nobody is there; Aborted: it belongs to another; InvalidRequest: another engine."""
        request = pb.JoinRequest(
            leader_id=leader.leader_id,
            replica=leader.name,
            nodes=leader.share.nodes,
            tensor_parallel=leader.share.tensor_parallel,
            host=self.host,
            store_address=leader.store,
        )
        with rpc_errors(self.title):
            await self.stub.Join(request, timeout=CALL_S)

    async def keep(self, on_stop: Callable[[], None]) -> None:
        """Beats for as long as the worker is well. on_stop: called when it was asked to end.

        Raises: Unavailable: it is gone, was started anew, or can serve no longer.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while True:
            try:
                reply = await self._beat(min(CALL_S, self._ttl_s / 3))
            except Aborted as error:
                raise Unavailable(str(error)) from None
            except TandemError as error:
                if loop.time() - heard_s > self._ttl_s:
                    raise Unavailable(f"{self.title} is gone: no word of it for {self._ttl_s:g} s ({error})") from None
            else:
                heard_s = loop.time()
                if reply.failure:
                    raise Unavailable(f"{self.title}: {reply.failure}")
                if reply.asked_to_stop:
                    on_stop()
            await asyncio.sleep(beat_s(self._ttl_s))

    async def trouble(self) -> str:
        """What is wrong with the worker, "" if nothing is; takes BLAME_S then. For when our own ranks have failed."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BLAME_S
        while True:
            try:
                reply = await self._beat(BLAME_S)
            except TandemError as error:
                return f"{self.title} is gone ({error})"
            if reply.failure:
                return f"{self.title}: {reply.failure}"
            if loop.time() > deadline_s:
                return ""
            await asyncio.sleep(RETRY_S)

    async def leave(self, reason: str, *, failed: bool) -> None:
        """Lets the worker go; one that does not hear it ends by itself, for our silence."""
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
    """Looks for the worker of one host until it has joined.

    Raises: DeadlineExceeded: naming the host, and why it did not; InvalidRequest: it runs another engine.
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
        f"host {host} of {leader.name} did not come within {timeout_s:g} s (a rollout_service with "
        f"TANDEM_HOST_INDEX={host}): {why}"
    )


def _find(registry: Registry, name: str) -> ServiceRecord:
    for record in registry.list(WORKER_ROLE):
        if record.name == name:
            return record
    failed = [str(each) for each in registry.failures() if each.role == WORKER_ROLE and each.name == name]
    raise Unavailable("; ".join([f"no {name} in the registry", *failed]))


async def _joined(leader: Leader, host: int, record: ServiceRecord) -> WorkerConnection:
    bond = WorkerConnection(leader, host, record)
    try:
        await bond.join(leader)
    except BaseException:
        await bond.channel.close()
        raise
    log.info("worker joined", worker=bond.title)
    return bond
