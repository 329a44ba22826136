"""Gathers whole Hugging Face tensors from a trainer's shards, each on the rank that sends it to the engines."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Message, cut_messages
from weightsync.plans.plan import TransferPlan, make_plan
from weightsync.plans.round_plan import source_layout
from weightsync.transfer.transports.packing import Packer

# "stages": the first rank of the pipeline stage that has the tensor; "everyone": all ranks, equal shares of the bytes.
Owners = Literal["stages", "everyone"]

MESSAGE_ELEMENTS = 2**24


def leader_of_stage(parallel: Parallel, rank: int) -> int:
    """Return the first rank of a rank's pipeline stage."""
    return rank // parallel.stage_size * parallel.stage_size


@lru_cache(maxsize=4)
def _plan(spec: ModelSpec, parallel: Parallel) -> TransferPlan:
    return make_plan(source_layout(spec, parallel), hf_layout(spec))


@lru_cache(maxsize=4)
def tensors_by_owner(spec: ModelSpec, parallel: Parallel, owners: Owners) -> list[list[str]]:
    """List, for each trainer rank, the names of the tensors that it gathers."""
    plan = _plan(spec, parallel)
    held: list[list[str]] = [[] for _ in range(parallel.world_size)]
    filled = [0] * parallel.world_size
    for param, name in enumerate(plan.target.params):
        ops = plan.ops[plan.ops["dst_param"] == param]
        first = leader_of_stage(parallel, int(ops["src"][0]))
        owner = first if owners == "stages" else filled.index(min(filled))
        filled[owner] += int((ops["rows"] * ops["cols"]).sum())
        held[owner].append(name)
    return held


@lru_cache(maxsize=4)
def _messages(spec: ModelSpec, parallel: Parallel, owners: Owners) -> list[Message]:
    plan = _plan(spec, parallel)
    ids = {name: param for param, name in enumerate(plan.target.params)}
    owner_of = np.zeros(len(ids), dtype=np.int64)
    for owner, names in enumerate(tensors_by_owner(spec, parallel, owners)):
        owner_of[[ids[name] for name in names]] = owner
    ops = plan.ops.copy()
    ops["dst"] = owner_of[ops["dst_param"]]
    ops = ops[np.lexsort((ops["src"], ops["dst"]))]
    return cut_messages(replace(plan, ops=ops), MESSAGE_ELEMENTS)


def gather(
    spec: ModelSpec, parallel: Parallel, rank: int, tensors: Mapping[str, torch.Tensor], owners: Owners
) -> dict[str, torch.Tensor]:
    """Gather the whole tensors that this rank owns; a collective of the default group, in which a shard moves once."""
    plan = _plan(spec, parallel)
    shapes = dict(zip(plan.target.params, plan.target.param_shapes, strict=True))
    sender = Packer(plan.source, tensors, "src")
    names = tensors_by_owner(spec, parallel, owners)[rank]
    whole = {name: torch.empty(shapes[name], dtype=sender.dtype) for name in names}
    receiver = Packer(plan.target, whole, "dst") if whole else None
    for message in _messages(spec, parallel, owners):
        if rank in (message.src, message.dst):
            _move(message, rank, sender, receiver)
    return whole


def _move(message: Message, rank: int, sender: Packer, receiver: Packer | None) -> None:
    if message.src == message.dst:
        for source, target in zip(sender.blocks(message), _blocks(receiver, message), strict=True):
            target.copy_(source)
        return
    payload = torch.empty(sender.payload_bytes(message), dtype=torch.uint8)
    if rank == message.src:
        sender.pack(message, payload)
        dist.send(payload, message.dst)
    else:
        dist.recv(payload, message.src)
        if receiver is not None:
            receiver.unpack(message, payload)


def _blocks(packer: Packer | None, message: Message) -> list[torch.Tensor]:
    return [] if packer is None else list(packer.blocks(message))
