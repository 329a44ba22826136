"""The workers of an engine as its leader has them: joined, watched, asked for their ranks, let go."""

import asyncio
import functools
import uuid
from collections.abc import Callable, Sequence

from rollout_service.hosts.connection import RETRY_S, Leader, WorkerConnection, join_worker
from rollout_service.hosts.host_ranks import HostRanks
from servicekit.errors import Unavailable, rpc_errors
from servicekit.life.tasks import cancel
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import DeadlineChannel
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import worker_pb2, worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from weightsync.round import deadlines
from weightsync.round.client import RoundClient


class WorkerRanks(RoundClient):
    """The ranks of one further host. `name` goes in front of their errors."""

    def __init__(self, channel: DeadlineChannel, leader_id: str, name: str, num_ranks: int) -> None:
        super().__init__(name, channel, deadlines.host_s, leader_id)
        self.num_ranks = num_ranks
        self._worker = worker_pb2_grpc.RolloutWorkerServiceStub(channel)

    async def load_published(self, request: weights_pb2.LoadPublishedRequest) -> None:
        """Load published weights from disk on all ranks. Raises: TandemError."""
        wrapped = worker_pb2.LoadPublishedShardsRequest(leader_id=self._leader_id, published=request)
        with rpc_errors(self._name):
            await self._worker.LoadPublishedShards(wrapped, timeout=deadlines.HOST_LOAD_S)

    async def checksums(self) -> list[dict[str, str]]:
        """Digest of every parameter, by its name, for each rank."""
        request = worker_pb2.GetRankChecksumsRequest(leader_id=self._leader_id)
        with rpc_errors(self._name):
            reply = await self._worker.GetRankChecksums(request, timeout=deadlines.HOST_CHECKSUM_S)
        return [dict(rank.checksums) for rank in reply.ranks]


class HostWorkers:
    """All workers of one engine; none where it is on one host, and then everything here is done at once.

    Args:
        on_stop: called when a worker was asked to end: the leader then drains.
    lost: fails as soon as a worker can serve no longer, and names it. To be made on the service's event loop.
    """

    def __init__(
        self, name: str, share: HostRanks, *, identity: Identity | None, ttl_s: float, on_stop: Callable[[], None]
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._make_leader = functools.partial(
            Leader, leader_id=uuid.uuid4().hex, name=name, share=share, ttl_s=ttl_s, identity=identity
        )
        self._share = share
        self._on_stop = on_stop
        self._leader_id = ""
        self._bonds: list[WorkerConnection] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def join(self, store: str, registry: Registry, timeout_s: float) -> None:
        """Waits for the worker of every other host. store: `host:port` where SGLang's ranks are to meet.

        Raises: DeadlineExceeded: naming each host that did not come, and why; InvalidRequest: one runs another engine.
        """
        leader = self._make_leader(store=store)
        self._leader_id = leader.leader_id
        joining = [
            asyncio.create_task(self._join_one(leader, host, registry, timeout_s), name=f"join-{host}")
            for host in range(1, self._share.nodes)
        ]
        try:
            await _all_or_first_errors(joining)
        finally:
            await cancel(*joining)
        self._bonds.sort(key=lambda bond: bond.host)

    async def _join_one(self, leader: Leader, host: int, registry: Registry, timeout_s: float) -> None:
        bond = await join_worker(leader, host, registry, timeout_s)
        self._bonds.append(bond)
        keeping = asyncio.create_task(bond.keep(self._on_stop), name=f"beats-{host}")
        keeping.add_done_callback(self._ended)
        self._keeping.append(keeping)

    def _ended(self, keeping: "asyncio.Task[None]") -> None:
        error = None if keeping.cancelled() else keeping.exception()
        if error is not None and not self.lost.done():
            self.lost.set_exception(error)

    def ranks(self) -> list[WorkerRanks]:
        """The ranks of each worker, in the order of the hosts."""
        each = len(self._share.ranks)
        return [WorkerRanks(bond.channel, self._leader_id, bond.title, each) for bond in self._bonds]

    async def explain(self, error: Exception) -> Exception:
        """What to fail with, when our own part has failed: a worker may be the cause. Takes BLAME_S if none is."""
        if not self._bonds or (self.lost.done() and self.lost.exception() is error):
            return error
        found = [text for text in await asyncio.gather(*(bond.trouble() for bond in self._bonds)) if text]
        return Unavailable(f"{'; '.join(found)}; seen here as {type(error).__name__}: {error}") if found else error

    async def leave(self, reason: str, *, failed: bool) -> None:
        """Lets all workers go."""
        await cancel(*self._keeping)
        await asyncio.gather(*(bond.leave(reason, failed=failed) for bond in self._bonds))

    async def close(self) -> None:
        """Ends the connections."""
        await cancel(*self._keeping)
        for bond in self._bonds:
            await bond.channel.close()


async def _all_or_first_errors(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Raises: one error for all that fail at about the time of the first: deadlines end together."""
    if not tasks:
        return
    _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if others:
        await asyncio.wait(others, timeout=2 * RETRY_S)
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    if errors:
        alike = [str(error) for error in errors if type(error) is type(errors[0])]
        raise errors[0] if len(alike) == 1 else type(errors[0])("; ".join(alike))
