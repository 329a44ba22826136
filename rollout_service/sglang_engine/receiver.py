"""Serves a rank's part in weight-sync rounds on a Unix socket, from threads of SGLang's scheduler process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import torch

from servicekit.errors import NotReady, PermissionDenied
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.round.client import only_phase
from weightsync.transfer.devices import on_device, wait_for_device
from weightsync.transfer.session import SyncMember

TEST_HOOKS = "TANDEM_TEST_HOOKS"


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings:
    """Settings of a rank's receiver; passed to the rank as environment variables TANDEM_RECEIVER_<FIELD>."""

    dir: str  # folder of the sockets; short, a socket's path has at most 107 bytes
    replica: str
    model: str
    tokenizer: str  # folder of tokenizer.json, for stop strings
    redis_url: str
    group: str
    host: str
    disk_folder: str  # of the transport disk
    lease_ttl_s: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "ReceiverSettings | None":
        """Read the settings; None in a process that Tandem did not start."""
        if _variable("dir") not in environ:
            return None
        values = {field.name: environ[_variable(field.name)] for field in fields(cls)}
        return cls(**values | {"lease_ttl_s": float(values["lease_ttl_s"])})  # type: ignore[arg-type]

    def to_env(self) -> dict[str, str]:
        """Return the settings as environment variables of the rank's process."""
        return {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}

    def address(self, rank: int) -> str:
        """Return the gRPC address of a rank."""
        return f"unix:{self.dir}/rank{rank}.sock"


def _variable(field: str) -> str:
    return f"TANDEM_RECEIVER_{field.upper()}"


def receivable_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Collect the tensors that inference reads and a checkpoint has: parameters and persistent buffers, by engine name.

    These are the engine's own tensors, not aliases, because a staged round exchanges their memory.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def load_with_sglang(model: torch.nn.Module, folder: str) -> None:
    """Load a Hugging Face folder with SGLang's own load_weights, called as its loaders do."""
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

    files = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    device = next(model.parameters()).device
    with on_device(device):
        model.load_weights(safetensors_weights_iterator(files))
    wait_for_device(device)


class ShardReceiver(weights_pb2_grpc.ShardReceiverServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """ShardReceiverService and RoundService of one rank."""

    def __init__(self, member: SyncMember, load_folder: Callable[[str], None]) -> None:
        self._member = member
        self._load_folder = load_folder

    def RunPhase(self, request: pb.RunPhaseRequest, context: Any) -> pb.RunPhaseResponse:
        """Run this rank's part in a phase."""
        return pb.RunPhaseResponse(reports=[self._member.run_phase(only_phase(request), request.round)])

    def LoadPublished(self, request: pb.LoadPublishedRequest, context: Any) -> pb.LoadPublishedResponse:
        """Load this rank's shard from published weights. Raises: NotReady: the folder has another version."""
        version = request.policy_version
        loaded = self._member.load_published(
            Path(request.folder), at_least=version, round_id=request.round_id, fence=request.fence
        )
        if loaded != version:
            raise NotReady(f"{request.folder} has version {loaded} by now, not {version}")
        return pb.LoadPublishedResponse()

    def GetChecksums(self, request: pb.GetChecksumsRequest, context: Any) -> pb.GetChecksumsResponse:
        """Compute the digest of every parameter of this rank."""
        return pb.GetChecksumsResponse(checksums=self._member.checksums())

    def PoisonWeights(self, request: pb.PoisonWeightsRequest, context: Any) -> pb.PoisonWeightsResponse:
        """Fill the weights with NaN (tests only)."""
        _check_test_hooks("PoisonWeights destroys the weights")
        return pb.PoisonWeightsResponse(num_tensors=self._member.poison())

    def LoadFolder(self, request: pb.LoadFolderRequest, context: Any) -> pb.LoadFolderResponse:
        """Load a Hugging Face folder with SGLang's own loader (tests only)."""
        _check_test_hooks("LoadFolder bypasses weight sync")
        self._load_folder(request.path)
        return pb.LoadFolderResponse()


def add_receiver(receiver: ShardReceiver, server: grpc.Server) -> None:
    """Register both services of a rank."""
    weights_pb2_grpc.add_ShardReceiverServiceServicer_to_server(receiver, server)
    weights_pb2_grpc.add_RoundServiceServicer_to_server(receiver, server)


def _check_test_hooks(why: str) -> None:
    if os.environ.get(TEST_HOOKS) != "1":
        raise PermissionDenied(f"{why}; it is for tests, with {TEST_HOOKS}=1")
