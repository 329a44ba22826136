"""A trainer and rollout replicas without engines, on real gRPC servers of the calling event loop."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from coordinator.clients.replica import Replica
from coordinator.clients.trainer import Trainer
from servicekit.redis.registry import Registry
from servicekit.rpc.server import GrpcServer
from servicekit.security.certificates import TlsFiles
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2_grpc
from tests.fakes.fake_rollout import FakeRollout
from tests.fakes.fake_trainer import FakeTrainer
from weightsync.round.client import SERVICE


@dataclass
class FakeFleet:
    """The services and clients of them."""

    trainer_service: FakeTrainer
    rollout_services: list[FakeRollout]
    addresses: dict[str, str]
    servers: dict[str, GrpcServer]
    trainer: Trainer
    replicas: list[Replica]
    # Of each service, where it is announced (announced_fleet.py).
    registries: dict[str, Registry] = field(default_factory=dict)


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
        servers = {"trainer": GrpcServer("trainer", identity=None if tls is None else Identity(tls, "trainer"))}
        servers["trainer"].add(
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            trainer_service,
            "tandem_api.trainer.v1.TrainerService",
        )
        servers["trainer"].add(weights_pb2_grpc.add_RoundServiceServicer_to_server, trainer_service, SERVICE)
        for service in rollouts:
            servers[service.name] = GrpcServer("rollout", identity=None if tls is None else Identity(tls, "rollout"))
            servers[service.name].add(
                rollout_pb2_grpc.add_RolloutServiceServicer_to_server, service, "tandem_api.rollout.v1.RolloutService"
            )
            servers[service.name].add(weights_pb2_grpc.add_RoundServiceServicer_to_server, service, SERVICE)
        addresses = {name: await server.start() for name, server in servers.items()}
        for server in servers.values():
            stack.push_async_callback(server.drain, 0.0)
        client = Trainer(addresses["trainer"])
        stack.push_async_callback(client.close)
        replicas = [Replica(service.name, addresses[service.name]) for service in rollouts]
        for replica in replicas:
            stack.push_async_callback(replica.close)
        yield FakeFleet(trainer_service, rollouts, addresses, servers, client, replicas)
