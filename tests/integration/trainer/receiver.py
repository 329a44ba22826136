"""A rollout rank without an engine, which takes the weights of a running trainer through its service."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tests.integration.trainer.processes import RUN_ID
from tests.kit.fleet import Fleet
from tests.kit.round import service_at
from tests.kit.stores import Tensors
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import load_shards


async def receive(
    address: str, redis_url: str, model: Path, trainer: Parallel
) -> tuple[Tensors, Sequence[weights_pb2.PhaseReport]]:
    """A whole round. Returns: what arrived, and the trainer ranks' reports of TRANSFER."""
    return await asyncio.to_thread(_receive, address, redis_url, model, trainer)


def _receive(
    address: str, redis_url: str, model: Path, trainer: Parallel
) -> tuple[Tensors, Sequence[weights_pb2.PhaseReport]]:
    with grpc.insecure_channel(address) as channel:
        status = trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
        replicas, services = {"rollout-0": Parallel()}, {"trainer": service_at(channel)}
        spec, group = ModelSpec.from_folder(model), f"tandem:{RUN_ID}"
        with Fleet(redis_url, spec, trainer, replicas, group=group, services=services) as fleet:
            times = {"formation_timeout_s": 20.0, "transfer_timeout_s": 20.0}
            reports = fleet.sync(fleet.round(status.policy_version, wait_s=10.0, **times))["trainer"].reports
            return fleet.stores["rollout-0/0"], reports


async def exported(stub: Any, model: Path, folder: Path) -> Tensors:
    """What must have arrived: the same parameters, read from the folder that the trainer exports."""
    await stub.ExportModel(pb.ExportModelRequest(path=str(folder)), timeout=60)
    spec = ModelSpec.from_folder(model)
    layout = sglang_layout(spec, Parallel())
    tensors = {name: torch.full(shape, torch.nan) for name, shape in layout.parameters_of(0).items()}
    load_shards(folder, spec, layout, 0, tensors)
    return tensors


def differing(left: Tensors, right: Tensors) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert sorted(left) == sorted(right)
    return [name for name in left if not torch.equal(left[name], right[name])]
