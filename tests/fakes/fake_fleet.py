"""A trainer and rollout replicas without engines, on real gRPC servers; as a module, a process until SIGTERM.

`python -m tests.fakes.fake_fleet REDIS_URL RUN_ID`: announced, so that measurements of the coordinator exclude them.
"""

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from servicekit.lifecycle.termination import run_main
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.rpc.server import GrpcServer
from servicekit.security.certificates import CA, CERT, KEY, TlsFiles
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tests.fakes.fake_rollout import FakeRollout
from tests.fakes.fake_trainer import FakeTrainer
from weightsync.membership.rendezvous import Rendezvous, SlotLease
from weightsync.round.client import SERVICE

SLOTS = ("trainer/0", "trainer/1", "rollout-0/0", "rollout-1/0")
_TTL_S = 60.0
_ADD: dict[str, Callable[[Any, Any], None]] = {
    "trainer": trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
    "rollout": rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
}


class StaticFleet:
    """A fleet as the coordinator sees it that never changes: all of `replicas`, always; they serve from the start."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._serving = self._replicas

    async def look(self) -> tuple[Replica, ...]:
        """Everyone."""
        return self._replicas

    def serving(self) -> tuple[Replica, ...]:
        """Whom admit() was last called with."""
        return self._serving

    def admit(self, replicas: Sequence[Replica]) -> None:
        """From now on these serve."""
        self._serving = tuple(replicas)


@dataclass
class FakeFleet:
    """The services and clients of them."""

    trainer_service: FakeTrainer
    rollout_services: list[FakeRollout]
    addresses: dict[str, str]
    servers: dict[str, GrpcServer]
    trainer: Trainer
    replicas: list[Replica]
    # Of each service, where it is announced.
    registries: dict[str, Registry] = field(default_factory=dict)


@asynccontextmanager
async def served(
    service: FakeTrainer | FakeRollout, role: str = "rollout", tls: TlsFiles | None = None
) -> AsyncIterator[tuple[GrpcServer, str]]:
    """Serve a service and its rounds. Returns: the server and its address."""
    server = GrpcServer(role, identity=None if tls is None else Identity(tls, role))
    server.add(_ADD[role], service, f"tandem_api.{role}.v1.{role.capitalize()}Service")
    server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, service, SERVICE)
    try:
        yield server, await server.start()
    finally:
        await server.drain(0.0)


@asynccontextmanager
async def fake_fleet(
    *,
    num_replicas: int = 2,
    trainer: FakeTrainer | None = None,
    tensor_parallel: int = 1,
    tls: TlsFiles | None = None,
) -> AsyncIterator[FakeFleet]:
    """Serve a fleet; everything has ended after the block. With `tls`, only who has a certificate can call it."""
    trainer_service = FakeTrainer() if trainer is None else trainer
    rollouts = [FakeRollout(name=f"rollout-{i}", tensor_parallel=tensor_parallel) for i in range(num_replicas)]
    async with AsyncExitStack() as stack:
        servers: dict[str, GrpcServer] = {}
        addresses: dict[str, str] = {}
        services: dict[str, FakeTrainer | FakeRollout] = {"trainer": trainer_service}
        for name, service in (services | {each.name: each for each in rollouts}).items():
            serving = served(service, name.partition("-")[0], tls)
            servers[name], addresses[name] = await stack.enter_async_context(serving)
        client = Trainer(addresses["trainer"])
        replicas = [Replica(each.name, addresses[each.name]) for each in rollouts]
        for close in (client.close, *(replica.close for replica in replicas)):
            stack.push_async_callback(close)
        yield FakeFleet(trainer_service, rollouts, addresses, servers, client, replicas)


@asynccontextmanager
async def announced(
    redis_url: str,
    run_id: str,
    name: str,
    address: str,
    slots: Sequence[str] = (),
    ttl_s: float = _TTL_S,
    settings: AgreedSettings | None = None,
) -> AsyncIterator[Registry]:
    """Announce a service in the registry, and hold its slots of the weight group."""
    group = Rendezvous(redis_url, f"tandem:{run_id}")
    async with AsyncExitStack() as stack:
        for slot in slots:
            lease = SlotLease(group, slot, ttl_s)
            await asyncio.to_thread(lease.start)
            stack.push_async_callback(asyncio.to_thread, lease.close)
        registry = await asyncio.to_thread(Registry, redis_url, run_id, settings=settings)
        stack.push_async_callback(asyncio.to_thread, registry.close)
        record = ServiceRecord(role=name.partition("-")[0], name=name, address=address, worker_id=uuid.uuid4().hex)
        await asyncio.to_thread(registry.announce, record, ttl_s)
        yield registry


@asynccontextmanager
async def announced_fleet(
    redis_url: str,
    run_id: str,
    trainer: FakeTrainer | None = None,
    tls: TlsFiles | None = None,
    ttl_s: float = _TTL_S,
    slots: Sequence[str] = SLOTS,
    settings: AgreedSettings | None = None,
) -> AsyncIterator[FakeFleet]:
    """Trainer TP 2 and two replicas, which the registry and the weight group know; with `settings` they say so."""
    async with fake_fleet(trainer=trainer, tls=tls) as fleet, AsyncExitStack() as stack:
        if settings is not None:
            fleet.trainer_service.settings_digest = settings.digest
            for rollout in fleet.rollout_services:
                rollout.settings_digest = settings.digest
        for name, address in fleet.addresses.items():
            own = [slot for slot in slots if slot.startswith(f"{name}/")]
            there = announced(redis_url, run_id, name, address, own, ttl_s, settings)
            fleet.registries[name] = await stack.enter_async_context(there)
        yield fleet


async def _serve(stop: asyncio.Event) -> None:
    tls = TlsFiles.of(*(os.environ.get(name, "") for name in (CERT, KEY, CA)))
    async with announced_fleet(sys.argv[1], sys.argv[2], tls=tls):
        await stop.wait()


if __name__ == "__main__":
    sys.exit(run_main("fleet", _serve))
