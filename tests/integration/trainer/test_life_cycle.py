"""Start, stop, resume and failure of a trainer of two ranks."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_files.checkpoints import mark_complete, step_folder
from tests.integration.trainer.processes import RUN_ID, TrainerProcesses, chunk, step_requests
from trainer_service.ranks.world import STORE_KEY
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

pytestmark = pytest.mark.integration
TIMEOUT_S = 60.0


async def call(address: str, method: str, request: Any) -> Any:
    async with open_channel(address) as channel:
        return await getattr(trainer_pb2_grpc.TrainerServiceStub(channel), method)(request, timeout=TIMEOUT_S)


def store_address(redis_url: str) -> str:
    """Where the ranks of the trainer meet, as rank 0 has published it."""
    registry = Registry(redis_url, RUN_ID)
    try:
        return registry.wait_value(STORE_KEY, TIMEOUT_S)
    finally:
        registry.close()


async def test_stop_resume_and_a_killed_rank(redis_server: str, tiny_model: Path, tmp_path: Path) -> None:
    """One test, because every start costs ten seconds of imports."""
    with TrainerProcesses(redis_server, tmp_path, tiny_model, pipeline_parallel=2) as trainer:
        address = trainer.begin().ready().address
        assert address.startswith("localhost:")
        assert store_address(redis_server).startswith("localhost ")
        reply = await call(address, "TrainStep", iter(step_requests("one", 0, [chunk(0)])))
        assert reply.policy_version == 1
        folder = step_folder(tmp_path, 1)
        saved = await call(address, "SaveCheckpoint", pb.SaveCheckpointRequest(path=str(folder / "trainer")))
        assert saved.bytes == sum(file.stat().st_size for file in (folder / "trainer").glob("*.safetensors"))
        mark_complete(folder, iteration=1)
        reply = await call(address, "TrainStep", iter(step_requests("two", 1, [chunk(0)])))
        newer = step_folder(tmp_path, 2)
        await call(address, "SaveCheckpoint", pb.SaveCheckpointRequest(path=str(newer / "trainer")))
        mark_complete(newer, iteration=2)
        shard = newer / "trainer" / "shard-tp00-pp01.safetensors"
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(content)

        # a follower that is asked to stop stops the whole trainer
        trainer.processes["trainer-1"].send_signal(signal.SIGTERM)
        assert trainer.exit_codes(trainer.ranks) == [0, 0]

        # another coordinator takes over while nobody serves
        newest = Rendezvous(redis_server, f"tandem:{RUN_ID}").lead(COORDINATOR_SLOT, "b", TIMEOUT_S)
        # Redis still holds the address of the first start's store
        address = trainer.begin("--resume").ready().address
        status = await call(address, "GetStatus", pb.GetStatusRequest())
        assert status.parallel.engine == "megatron"
        assert status.policy_version == 1  # rank 1 has found its shard damaged, and all have stepped over it
        assert "shard-tp00-pp01.safetensors has other bytes than were written" in trainer.log("trainer-1").read_text()

        older = pb.TakeOverRequest(fence=CoordinatorFence(worker_id="a", token=newest - 1))
        with pytest.raises(grpc.RpcError, match=rf"coordinator a .* coordinator b \(token {newest}\) has taken over"):
            await call(address, "TakeOver", older)

        trainer.processes["trainer-1"].send_signal(signal.SIGKILL)
        assert trainer.exit_codes(trainer.ranks) == [1, -signal.SIGKILL]
        assert "rank 1" in trainer.log("trainer-0").read_text().splitlines()[-1]


async def test_a_trainer_that_is_asked_to_end_serves_until_what_it_has_trained_is_saved(
    redis_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    """As long as a coordinator asks for its status; without one it ends, and the step is lost."""
    with TrainerProcesses(redis_server, tmp_path, tiny_model, pipeline_parallel=2) as trainer:
        address = trainer.begin().ready().address
        await call(address, "TrainStep", iter(step_requests("one", 0, [chunk(0)])))
        assert not (await call(address, "GetStatus", pb.GetStatusRequest())).leaving
        trainer.processes["trainer-1"].send_signal(signal.SIGTERM)  # its node is drained
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (await call(address, "GetStatus", pb.GetStatusRequest())).leaving:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        # What it is to save may not be whole yet: the iteration goes on.
        assert (await call(address, "TrainStep", iter(step_requests("two", 1, [chunk(0)])))).policy_version == 2
        folder = step_folder(tmp_path, 2)
        saving = pb.SaveCheckpointRequest(path=str(folder / "trainer"), background=True)
        await call(address, "SaveCheckpoint", saving)
        await call(address, "FinishCheckpoint", pb.FinishCheckpointRequest(path=str(folder / "trainer")))
        assert trainer.exit_codes(trainer.ranks) == [0, 0]
        mark_complete(folder, iteration=2)

        address = trainer.begin("--resume").ready().address
        reply = await call(address, "TrainStep", iter(step_requests("three", 2, [chunk(0)])))
        assert reply.policy_version == 3
        trainer.processes["trainer-0"].send_signal(signal.SIGTERM)
        assert trainer.exit_codes(trainer.ranks) == [0, 0]
        assert "shutdown: checkpoint not saved" not in trainer.log("trainer-0").read_text()
