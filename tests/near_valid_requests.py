"""Requests that are right for what a service does now, and the same with a field or two changed.

A random message (hostile_requests.py) is refused at the edge; these get past it, into what the service has begun.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.layouts.layout import Parallel
from weightsync.round.phases import PHASES

FENCE = CoordinatorFence(worker_id="fuzz", token=1)
CALL_S = 10.0
TRANSPORTS = (pb.SYNC_TRANSPORT_AUTO, pb.SYNC_TRANSPORT_COLLECTIVE, pb.SYNC_TRANSPORT_DISK)
PAUSES = (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP_KV, pb.PAUSE_MODE_ABORT_REQUEUE)
# Longer than the other side of a phase needs when both do it; what takes longer waits for somebody.
PARTNER_S = 1.0
Partner = Callable[[pb.RoundPhase.ValueType, pb.Round], object]
NewValue = Callable[[FieldDescriptor], Any]


def changed(message: Message, chance: random.Random, new_value: NewValue) -> Message:
    """A copy in which one field, however deep, has another value, is left out, or has an item more or less."""
    copy = type(message)()
    copy.CopyFrom(message)
    fields = list(_fields(copy))
    if not fields:  # GetStatus has none, and a message of which all were left out
        return copy
    owner, field = chance.choice(fields)
    items = getattr(owner, field.name)
    if chance.random() < 0.2:
        owner.ClearField(field.name)
    elif field.is_repeated:
        if items and chance.random() < 0.5:
            del items[chance.randrange(len(items))]
        else:
            items.extend([chance.choice(list(items)) if items and chance.random() < 0.5 else new_value(field)])
    elif field.message_type is not None:
        items.CopyFrom(new_value(field))
    else:
        setattr(owner, field.name, new_value(field))
    return copy


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    # The C++ descriptors have the same attributes.
    for field in cast(Descriptor, message.DESCRIPTOR).fields:
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue
        yield message, field
        if field.message_type is None:
            continue
        for part in getattr(message, field.name) if field.is_repeated else [getattr(message, field.name)]:
            yield from _fields(part)


class Rounds:
    """One sync round after the other, phase by phase.

    Args:
        group, epoch: of the weight group, the latter as it is now.
        folder: where rounds of the transport disk write.
        replicas: who takes part beside the trainer.
        partner: the other side, which does each phase as it should be done, beside the service that is asked.
    """

    def __init__(
        self,
        group: str,
        epoch: Callable[[], int],
        folder: Path,
        replicas: tuple[pb.ReplicaSpec, ...],
        partner: Partner = lambda phase, round_: None,
    ) -> None:
        self._group, self._epoch, self._folder, self._replicas = group, epoch, folder, replicas
        self._partner = partner
        self._beside = ThreadPoolExecutor(1)
        self._doing: Future[object] = Future()
        self._doing.set_result(None)
        self._left: list[pb.RoundPhase.ValueType] = []
        self._count = 0
        self._round = pb.Round()

    def next(self, version: int, chance: random.Random) -> tuple[pb.RoundPhase.ValueType, pb.Round]:
        """The phase that is next, and its round; the partner has begun it."""
        if self._given_up() or not self._left:
            self._left = list(PHASES)
            if chance.random() < 0.3:
                self._left[chance.randrange(1, len(PHASES)) :] = [pb.ROUND_PHASE_ABORT]
            self._round = self.begun(version, chance.choice(TRANSPORTS))
            self._round.install_mode = chance.choice([pb.INSTALL_MODE_STAGED, pb.INSTALL_MODE_IN_PLACE])
            self._round.pause_mode = chance.choice(PAUSES)
        phase = self._left.pop(0)
        self._doing = self._beside.submit(self._partner, phase, self._round)
        return phase, self._round

    def _given_up(self) -> bool:
        """Whether the last round has come to nothing, as what was asked for was not what the partner did."""
        if not wait([self._doing], PARTNER_S).done:
            with contextlib.suppress(grpc.RpcError):
                self._partner(pb.ROUND_PHASE_ABORT, self._round)
            wait([self._doing], CALL_S)
        return self._doing.exception() is not None

    def run(self, round_: pb.Round, own: Partner) -> None:
        """Every phase on both sides. Raises: grpc.RpcError"""
        for phase in PHASES:
            theirs = self._beside.submit(self._partner, phase, round_)
            own(phase, round_)
            theirs.result(timeout=CALL_S)

    def begun(self, version: int, transport: pb.SyncTransport.ValueType) -> pb.Round:
        """Another round."""
        self._count += 1
        return pb.Round(
            round_id=f"{self._folder.name}-{self._count}",
            policy_version=version,
            group=self._group,
            epoch=self._epoch(),
            trainer=Parallel(tensor=2).to_proto(),
            replicas=self._replicas,
            install_mode=pb.INSTALL_MODE_STAGED,
            pause_mode=pb.PAUSE_MODE_DRAIN,
            formation_timeout_s=5.0,
            transfer_timeout_s=5.0,
            transport=transport,
            disk_folder=str(self._folder),
            fence=FENCE,
            failed_rounds=self._count,
        )


class Near:
    """Right requests of a service, which asks it for its policy version first."""

    published_version = 0

    def __init__(self, stub: Any, status: Message, rounds: Rounds) -> None:
        self._stub, self._status, self._rounds = stub, status, rounds

    def requests(self, method: str, chance: random.Random) -> list[Message]:
        """The messages of one call."""
        version = self._stub.GetStatus(self._status, timeout=CALL_S).policy_version
        if method == "GetStatus":
            return [self._status]
        if method == "RunPhase":
            phase, round_ = self._rounds.next(max(version, self.published_version), chance)
            return [pb.RunPhaseRequest(phase=phase, round=round_)]
        return self.own(method, version, chance)

    def own(self, method: str, version: int, chance: random.Random) -> list[Message]:
        """Of a method that only this service has."""
        raise NotImplementedError


class ForTrainer(Near):
    """Requests of a TrainerService at this address. run_dir: where it may write."""

    def __init__(self, address: str, run_dir: Path, rounds: Rounds) -> None:
        stub = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel(address))
        super().__init__(stub, trainer_pb2.GetStatusRequest(), rounds)
        self._run_dir, self._count = run_dir, 0

    def own(self, method: str, version: int, chance: random.Random) -> list[Message]:
        path = str(self._run_dir / f"near-{method}-{chance.randrange(2)}")
        if method == "TrainStep":
            self._count += 1
            header = trainer_pb2.TrainStepHeader(
                step_id=f"near-{self._count}", policy_version=version, num_updates=1, num_samples=2, fence=FENCE
            )
            batch = trainer_pb2.TrainStepRequest(chunk=_samples())
            return [trainer_pb2.TrainStepRequest(header=header), batch]
        saved = self._run_dir / "near-SaveCheckpoint-0"
        others: dict[str, Message] = {
            "TakeOver": trainer_pb2.TakeOverRequest(fence=FENCE),
            "ComputeLogprobs": trainer_pb2.ComputeLogprobsRequest(chunk=_samples()),
            "SaveCheckpoint": trainer_pb2.SaveCheckpointRequest(path=path, fence=FENCE),
            "ExportModel": trainer_pb2.ExportModelRequest(path=path, fence=FENCE),
            "RestorePolicy": trainer_pb2.RestorePolicyRequest(
                path=str(saved) if saved.exists() else "", policy_version=version, fence=FENCE
            ),
        }
        return [others[method]]


def _samples() -> trainer_pb2.SampleChunk:
    return trainer_pb2.SampleChunk(
        sample_ids=["a", "b"],
        prompt_lengths=[2, 1],
        completion_lengths=[1, 2],
        token_ids=[1, 2, 3, 4, 5, 6],
        rollout_logprobs=[-0.1, -0.2, -0.3],
        advantages=[1.0, -1.0],
        trainable=[True, True],
    )


class ForRollout(Near):
    """Requests of a RolloutService at this address.

    Args:
        published: folder, version and round of what lies on disk for a replica without weights.
    """

    def __init__(
        self, address: str, rounds: Rounds, published: tuple[Path, int, str] = (Path("/nowhere"), 1, "r-1")
    ) -> None:
        stub = rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(address))
        super().__init__(stub, rollout_pb2.GetStatusRequest(), rounds)
        self._folder, self.published_version, self._round_id = published

    def own(self, method: str, version: int, chance: random.Random) -> list[Message]:
        groups = [rollout_pb2.PromptGroup(group_id=str(i), prompt_ids=[1 + i, 2], num_completions=2) for i in range(2)]
        sampling = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)
        others: dict[str, Message] = {
            "TakeOver": rollout_pb2.TakeOverRequest(fence=FENCE),
            "GenerateGroups": rollout_pb2.GenerateGroupsRequest(
                groups=groups, sampling=sampling, policy_version=version
            ),
            "LoadPublishedWeights": rollout_pb2.LoadPublishedWeightsRequest(
                folder=str(self._folder), policy_version=self.published_version, round_id=self._round_id, fence=FENCE
            ),
            "PauseGeneration": rollout_pb2.PauseGenerationRequest(mode=chance.choice(PAUSES), fence=FENCE),
            "ResumeGeneration": rollout_pb2.ResumeGenerationRequest(fence=FENCE),
            "GetChecksums": rollout_pb2.GetChecksumsRequest(),
        }
        return [others[method]]


def taking_part(address: str) -> Partner:
    """A trainer's or a replica's part in rounds."""
    stub = weights_pb2_grpc.RoundServiceStub(grpc.insecure_channel(address))
    return lambda phase, round_: stub.RunPhase(pb.RunPhaseRequest(phase=phase, round=round_), timeout=CALL_S)
