"""A rollout rank without an engine, which takes the weights of a running trainer through its service."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tests.integration.trainer.processes import RUN_ID
from weightsync.group.rendezvous import Rendezvous
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import load_shards
from weightsync.transfer.session import SyncMember

GROUP = f"tandem:{RUN_ID}"
Tensors = dict[str, torch.Tensor]


async def receive(
    stub: Any, rounds: Any, redis_url: str, model: Path, trainer: Parallel
) -> tuple[Tensors, Sequence[weights_pb2.PhaseReport]]:
    """A whole round. Returns: what arrived, and the trainer ranks' reports of TRANSFER."""
    spec, parallel = ModelSpec.from_folder(model), Parallel()
    shapes = sglang_layout(spec, parallel).parameters_of(0)
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    member = SyncMember(
        spec=spec, slot="rollout-0/0", parallel=parallel, tensors=tensors, redis_url=redis_url, group=GROUP
    )
    member.start()
    reports: Sequence[weights_pb2.PhaseReport] = []
    try:
        round_ = await _round(stub, redis_url, trainer)
        with ThreadPoolExecutor(1) as pool:
            for phase in ("PREPARE", "TRANSFER", "VERIFY", "COMMIT"):
                number = weights_pb2.RoundPhase.Value(f"ROUND_PHASE_{phase}")
                mine = pool.submit(member.run_phase, number, round_)
                if phase != "VERIFY":
                    request = weights_pb2.RunPhaseRequest(phase=number, round=round_)
                    reply = await rounds.RunPhase(request, timeout=60)
                    reports = reply.reports if phase == "TRANSFER" else reports
                mine.result(timeout=30)
    finally:
        member.close()
    return tensors, reports


async def _round(stub: Any, redis_url: str, trainer: Parallel) -> weights_pb2.Round:
    status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    slots = [*(f"trainer/{rank}" for rank in range(trainer.world_size)), "rollout-0/0"]
    return weights_pb2.Round(
        round_id="round-1",
        policy_version=status.policy_version,
        group=GROUP,
        epoch=Rendezvous(redis_url, GROUP).wait_for(slots, 10.0).epoch,
        trainer=trainer.to_proto(),
        replicas=[weights_pb2.ReplicaSpec(name="rollout-0", parallel=Parallel().to_proto())],
        install_mode=weights_pb2.INSTALL_MODE_IN_PLACE,
        bucket_bytes=2**12,
        formation_timeout_s=20.0,
        transfer_timeout_s=20.0,
    )


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
