"""The leader's side of an engine over several hosts: join the workers, watch them, use their ranks, release them."""

import asyncio
import functools
import uuid
from collections.abc import Callable, Sequence

from rollout_service.hosts.connection import RETRY_S, Leader, WorkerConnection, join_worker
from rollout_service.hosts.host_ranks import HostRanks
from servicekit.errors import Unavailable, rpc_errors
from servicekit.lifecycle.tasks import cancel
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import DeadlineChannel
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import worker_pb2, worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from weightsync.round import deadlines
from weightsync.round.client import RoundClient


class WorkerRanks(RoundClient):
    """Client of the ranks of one further host. `name` goes in front of their errors."""

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
        """Return the digests of each rank's parameters, by name."""
        request = worker_pb2.GetRankChecksumsRequest(leader_id=self._leader_id)
        with rpc_errors(self._name):
            reply = await self._worker.GetRankChecksums(request, timeout=deadlines.HOST_CHECKSUM_S)
        return [dict(rank.checksums) for rank in reply.ranks]


class HostWorkers:
    """All workers of one engine; none where it is on one host, and then every method returns immediately.

    Create it on the service's event loop.

    Args:
        on_stop: called when a worker was asked to stop: the leader then drains.
    Attributes:
        lost: fails as soon as a worker can no longer serve, and names it.
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
        self._workers: list[WorkerConnection] = []
        self._beating: list[asyncio.Task[None]] = []

    async def join(self, store: str, registry: Registry, timeout_s: float) -> None:
        """Join the worker of every other host.

        Args:
            store: `host:port` of the TCP store where SGLang's ranks meet.
            timeout_s: how long to wait for workers that are not announced or do not answer.
        Raises: DeadlineExceeded: naming each host that did not join, and why; InvalidRequest: one is configured for
            another engine.
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
        self._workers.sort(key=lambda worker: worker.host)

    async def _join_one(self, leader: Leader, host: int, registry: Registry, timeout_s: float) -> None:
        worker = await join_worker(leader, host, registry, timeout_s)
        self._workers.append(worker)
        beating = asyncio.create_task(worker.keep(self._on_stop), name=f"beats-{host}")
        beating.add_done_callback(self._ended)
        self._beating.append(beating)

    def _ended(self, beating: "asyncio.Task[None]") -> None:
        error = None if beating.cancelled() else beating.exception()
        if error is not None and not self.lost.done():
            self.lost.set_exception(error)

    def ranks(self) -> list[WorkerRanks]:
        """Make clients of each worker's ranks, in the order of the hosts."""
        num_ranks = len(self._share.ranks)
        return [WorkerRanks(worker.channel, self._leader_id, worker.title, num_ranks) for worker in self._workers]

    async def explain(self, error: Exception) -> Exception:
        """Return the error to fail with: ours, or a worker's that has caused it. Takes BLAME_S if none has."""
        if not self._workers or (self.lost.done() and self.lost.exception() is error):
            return error
        causes = [text for text in await asyncio.gather(*(worker.trouble() for worker in self._workers)) if text]
        return Unavailable(f"{'; '.join(causes)}; seen here as {type(error).__name__}: {error}") if causes else error

    async def leave(self, reason: str, *, failed: bool) -> None:
        """Release all workers."""
        await cancel(*self._beating)
        await asyncio.gather(*(worker.leave(reason, failed=failed) for worker in self._workers))

    async def close(self) -> None:
        """Close the connections."""
        await cancel(*self._beating)
        for worker in self._workers:
            await worker.channel.close()


async def _all_or_first_errors(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all tasks. Raises: one error for all that fail close to the first one: deadlines end together."""
    if not tasks:
        return
    _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if others:
        await asyncio.wait(others, timeout=2 * RETRY_S)
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    if errors:
        alike = [str(error) for error in errors if type(error) is type(errors[0])]
        raise errors[0] if len(alike) == 1 else type(errors[0])("; ".join(alike))
