"""A mixture of experts over two data-parallel ranks: each has half of the experts, and a copy of all the rest."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from servicekit.rpc.channel import open_channel
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tests.integration.trainer.processes import TrainerProcesses, chunk, step_requests
from tests.kit.models import save_model
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel

pytestmark = pytest.mark.integration
SIZES = {"data_parallel": 2, "expert_parallel": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen3-moe", folder)
    return folder


@pytest.fixture(scope="module")
def trainer(module_redis: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcesses]:
    with TrainerProcesses(module_redis, tmp_path_factory.mktemp("trainer"), model, **SIZES) as processes:
        yield processes.begin()


async def test_data_parallel_ranks_share_the_load(trainer: TrainerProcesses) -> None:
    address = trainer.ready().address
    async with open_channel(address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        assert (status.world_size, status.parallel.data, status.parallel.expert) == (2, 2, 2)
        step = step_requests("step-1", status.policy_version, [chunk(num_samples=8)])
        await stub.TrainStep(iter(step), timeout=60)
        tensors, reports = await asyncio.to_thread(trainer.receive, Parallel(data=2, expert=2))
        assert same(tensors, await trainer.exported(stub, trainer.folder / "hf")) == []
    sent = [report.bytes_sent for report in reports]
    weights = load_file(trainer.folder / "hf" / "model.safetensors").values()  # without the engine's padding
    assert sum(sent) == sum(tensor.nbytes for tensor in weights)
    assert max(sent) <= 1.10 * sum(sent) / len(sent)
