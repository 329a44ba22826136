"""kill -9 in the middle of a checkpoint that the trainer writes in the background."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from launcher.cli import app
from servicekit.rpc.arrays import read_array
from servicekit.rpc.channel import open_channel
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_files.checkpoints import list_complete, mark_complete, newest_sound, step_folder, usable
from tests.integration.trainer.held_trainer import HALF_WRITTEN, UNPUBLISHED, Point, is_held, order_hold
from tests.integration.trainer.processes import TrainerProcesses, chunk, step_requests
from tests.kit.processes import START_S
from tests.kit.stores import same
from tests.kit.waiting import until

pytestmark = pytest.mark.integration
TIMEOUT_S = 60.0
HELD = "tests.integration.trainer.held_trainer"
FOLLOWER = "shard-tp00-pp01.safetensors"


async def train(stub: Any, version: int) -> None:
    requests = step_requests(f"step-{version}", version, [chunk(seed=version)])
    reply = await stub.TrainStep(iter(requests), timeout=TIMEOUT_S)
    assert reply.policy_version == version + 1


async def policy(stub: Any) -> np.ndarray:
    """Log-probs by which two policies are compared."""
    call = stub.ComputeLogprobs(iter([pb.ComputeLogprobsRequest(chunk=chunk(0))]), timeout=TIMEOUT_S)
    return np.concatenate([np.array(read_array(reply, "logprobs_f32")) async for reply in call])


async def begin_save(stub: Any, path: Path) -> "asyncio.Future[Any]":
    """Begins a checkpoint. Returns: the call of FinishCheckpoint, after which a coordinator marks it complete."""
    await stub.SaveCheckpoint(pb.SaveCheckpointRequest(path=str(path), background=True), timeout=TIMEOUT_S)
    finish = stub.FinishCheckpoint(pb.FinishCheckpointRequest(path=str(path)), timeout=TIMEOUT_S)
    finishing: asyncio.Future[Any] = asyncio.ensure_future(finish)
    return finishing


async def save(stub: Any, run_dir: Path, version: int) -> Path:
    """A whole checkpoint, as the coordinator makes it. Returns: the trainer's part."""
    folder = step_folder(run_dir, version)
    await (await begin_save(stub, folder / "trainer"))
    mark_complete(folder, iteration=version, policy_version=version, model="tiny")
    return folder / "trainer"


async def other_address(trainer: TrainerProcesses, lost: str) -> str:
    """Waits for the next start's announcement; that of a start which was killed stays for the time of its lease."""
    await asyncio.to_thread(until, lambda: trainer.ready().address != lost, START_S, "a new trainer", interval_s=0.05)
    return trainer.ready().address


def listed(run_dir: Path) -> str:
    """Output of `tandem checkpoints`, which compares every file with its digest."""
    result = CliRunner().invoke(app, ["checkpoints", str(run_dir)])
    assert result.exit_code == 0, result.output
    return result.output


# rank 1 first, so that rank 0 has written its file and waits; then rank 0 when all but the rename is done
@pytest.mark.parametrize(("rank", "point"), [(1, HALF_WRITTEN), (0, UNPUBLISHED)])
async def test_a_crash_in_the_middle_of_a_checkpoint_leaves_the_one_before_valid(
    redis_server: str, tiny_model: Path, tmp_path: Path, rank: int, point: Point
) -> None:
    newer = step_folder(tmp_path, 2)
    partial = newer / ".trainer.partial"
    with TrainerProcesses(redis_server, tmp_path, tiny_model, pipeline_parallel=2) as trainer:
        address = trainer.begin(module=HELD).ready().address
        async with open_channel(address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            await train(stub, 0)
            older = await save(stub, tmp_path, 1)
            whole_bytes = (older / FOLLOWER).stat().st_size
            trained_once = await policy(stub)
            await train(stub, 1)
            trained_twice = await policy(stub)
            assert not np.array_equal(trained_once, trained_twice)

            order_hold(tmp_path, rank, point)
            finish = await begin_save(stub, newer / "trainer")
            await asyncio.to_thread(until, lambda: is_held(tmp_path, rank, point), TIMEOUT_S)
            await train(stub, 2)  # it is written in the background
            assert {path.name for path in newer.iterdir()} == {partial.name}
            # held: what FinishCheckpoint says would be marked as complete
            assert not finish.done()
            for name in trainer.ranks:
                trainer.kill(name)
            with pytest.raises(grpc.RpcError) as lost:
                await finish
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        if point == HALF_WRITTEN:
            assert 0 < (partial / FOLLOWER).stat().st_size < whole_bytes
            assert not (partial / f"{FOLLOWER}.digest").exists()

        found, others = usable(tmp_path)
        assert [iteration for iteration, _ in found] == [1]
        assert [(each.iteration, each.unfinished) for each in others] == [(2, True)]
        sound = newest_sound(tmp_path)
        assert sound is not None
        assert sound.iteration == 1
        assert "unfinished" in listed(tmp_path)

        async with open_channel(await other_address(trainer.begin("--resume"), address)) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            assert (await stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)).policy_version == 1
            assert np.array_equal(await policy(stub), trained_once)
            # masters, moments and random states too
            again = tmp_path / "again"
            await stub.SaveCheckpoint(pb.SaveCheckpointRequest(path=str(again)), timeout=TIMEOUT_S)
            for file in older.glob("*.safetensors"):
                assert same(load_file(again / file.name), load_file(file)) == []
            await train(stub, 1)
            assert np.array_equal(await policy(stub), trained_twice)
            assert partial.exists()  # the coordinator would have removed it; the trainer needs no help
            await save(stub, tmp_path, 2)
        assert not partial.exists()
        assert [iteration for iteration, _ in list_complete(tmp_path)] == [1, 2]
        assert "unfinished" not in listed(tmp_path)
        assert trainer.stop(trainer.ranks) == [0, 0]
