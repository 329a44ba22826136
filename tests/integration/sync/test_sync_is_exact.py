"""What a sync writes into SGLang is, bit for bit, what SGLang's own loader puts there from the exported folder.

Real trainer processes, real SGLang replicas (one of TP 1, one of TP 2), real Redis, gloo. Every parameter is NaN before
each of the two, so that nothing can be right by having been right before.
"""

import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file

from coordinator.replica import Replica
from coordinator.trainer import Trainer
from coordinator.weights import WeightSync
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem_config.schema import RunConfig
from tests.integration.trainer.tiny_models import save_model
from tests.service_processes import Services
from tests.weight_stores import same
from weightsync.rendezvous import Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUN_ID = "exact"
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # trainer TP, PP
REPLICAS = {"rollout-0": 1, "rollout-1": 2}  # rollout TP


@pytest.fixture
def services(redis_server: str) -> Iterator[Services]:
    # Not tmp_path: receivers make Unix sockets below it, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sync-") as folder:
        running = Services(redis_server, Path(folder), RUN_ID)
        yield running
        running.close()


def configuration(model: Path, *, trainer: tuple[int, int] = (1, 1), rollout_tp: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": RUN_ID},
            "model": {"path": model},
            "data": {"train": model / "unused.jsonl"},
            "trainer": {"tensor_parallel": trainer[0], "pipeline_parallel": trainer[1]},
            "rollout": {"tensor_parallel": rollout_tp, "max_total_tokens": 1024},
            "sync": {"bucket_mib": 0.01},
        }
    )


def receivers(services: Services) -> dict[str, weights_pb2_grpc.ShardReceiverServiceStub]:
    """A stub per rollout rank."""
    return {
        f"{name}/{rank}": weights_pb2_grpc.ShardReceiverServiceStub(grpc.insecure_channel(address))
        for name in REPLICAS
        for rank, address in enumerate(services.sockets_of(name))
    }


def checksums(stubs: dict[str, weights_pb2_grpc.ShardReceiverServiceStub]) -> dict[str, dict[str, str]]:
    return {
        slot: dict(stub.GetChecksums(weights_pb2.GetChecksumsRequest(), timeout=30).checksums)
        for slot, stub in stubs.items()
    }


def poison(stubs: dict[str, weights_pb2_grpc.ShardReceiverServiceStub]) -> None:
    for stub in stubs.values():
        assert stub.PoisonWeights(weights_pb2.PoisonWeightsRequest(), timeout=30).num_tensors > 20


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2", "qwen3"])
async def test_sync_writes_what_sglang_would_load(kind: str, services: Services, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(kind, model)
    for name, rollout_tp in REPLICAS.items():
        services.start_rollout(name, configuration(model, rollout_tp=rollout_tp))
    for layout in LAYOUTS:
        names = services.start_trainer(configuration(model, trainer=layout))
        exported = tmp_path / f"hf-{layout[0]}-{layout[1]}"
        await export(services, exported)
        # HF -> Megatron -> HF is the identity.
        assert same(load_file(exported / "model.safetensors"), load_file(model / "model.safetensors")) == []
        await compare(services, exported)
        assert services.stop(names) == [0] * len(names)


async def export(services: Services, folder: Path) -> None:
    address = services.address_of("trainer", "trainer")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        await stub.ExportModel(trainer_pb2.ExportModelRequest(path=str(folder)), timeout=60)


async def compare(services: Services, exported: Path) -> None:
    addresses = {name: services.address_of("rollout", name) for name in REPLICAS}
    stubs = receivers(services)
    assert list(stubs) == ["rollout-0/0", "rollout-1/0", "rollout-1/1"]
    poison(stubs)
    before = checksums(stubs)
    for stub in stubs.values():
        stub.LoadFolder(weights_pb2.LoadFolderRequest(path=str(exported)), timeout=30)
    truth = checksums(stubs)
    assert all(before[slot][name] != truth[slot][name] for slot in truth for name in truth[slot])
    poison(stubs)
    async with AsyncExitStack() as stack:
        trainer = Trainer(services.address_of("trainer", "trainer"))
        stack.push_async_callback(trainer.close)
        replicas = [Replica(name, address) for name, address in addresses.items()]
        for replica in replicas:
            stack.push_async_callback(replica.close)
        group = Rendezvous(services.redis_url, f"tandem:{RUN_ID}")
        sync = WeightSync(trainer=trainer, replicas=replicas, group=group, settings=configuration(exported).sync)
        result = await sync.publish(0)
    assert result.redundancy == 1.0
    assert checksums(stubs) == truth
