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
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.round import RunPhase
from tests.unit.trainer.batches import message
from tools.bench_sync.whole_groups import prompt_group
from weightsync.round.phases import PHASES, Phase

FENCE = CoordinatorFence(worker_id="fuzz", token=1)
CALL_S = 10.0
TRANSPORTS = (pb.SYNC_TRANSPORT_AUTO, pb.SYNC_TRANSPORT_COLLECTIVE, pb.SYNC_TRANSPORT_DISK)
INSTALLS = (pb.INSTALL_MODE_STAGED, pb.INSTALL_MODE_IN_PLACE)
PAUSES = (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP_KV, pb.PAUSE_MODE_ABORT_REQUEUE, pb.PAUSE_MODE_RECOMPUTE)
# Longer than the other side of a phase needs when both do it; what takes longer waits for somebody.
PARTNER_S = 1.0
NewValue = Callable[[FieldDescriptor], Any]
SAMPLES = message()
GROUPS = [
    prompt_group("0", [1, 2], 2),
    prompt_group("1", [2, 2], 2),
]
SAMPLING = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)


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
        new_round: makes a round in which group, epoch and participants are as they are now.
        folder: where rounds of the transport disk write.
        partner: the other side, which does each phase as it should be done, beside the service that is asked.
    """

    def __init__(
        self, new_round: Callable[..., pb.Round], folder: Path, partner: RunPhase = lambda phase, round_: None
    ) -> None:
        self._new_round, self._folder, self._partner = new_round, folder, partner
        self._beside = ThreadPoolExecutor(1)
        self._doing: Future[object] = Future()
        self._doing.set_result(None)
        self._left: list[Phase] = []
        self._count = 0
        self._round = pb.Round()

    def next(self, version: int, chance: random.Random) -> tuple[Phase, pb.Round]:
        """The phase that is next, and its round; the partner has begun it."""
        if self._given_up() or not self._left:
            self._left = list(PHASES)
            if chance.random() < 0.3:
                self._left[chance.randrange(1, len(PHASES)) :] = [pb.ROUND_PHASE_ABORT]
            self._round = self.begun(version, chance.choice(TRANSPORTS))
            self._round.install_mode, self._round.pause_mode = chance.choice(INSTALLS), chance.choice(PAUSES)
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

    def begun(self, version: int, transport: pb.SyncTransport.ValueType) -> pb.Round:
        """Another round."""
        self._count += 1
        return self._new_round(
            policy_version=version,
            round_id=f"{self._folder.name}-{self._count}",
            install_mode=pb.INSTALL_MODE_STAGED,
            formation_timeout_s=5.0,
            transfer_timeout_s=5.0,
            transport=transport,
            disk_folder=str(self._folder),
            fence=FENCE,
            failed_rounds=self._count,
        )


class Near:
    """Right requests of a service, which is asked for its policy version first.

    Args:
        run_dir: where a trainer may write.
        published: the round that lies on disk for a replica without weights.
    """

    def __init__(self, address: str, service: Any, rounds: Rounds, run_dir: Path, published: pb.Round) -> None:
        status = service.methods_by_name["GetStatus"]
        self._status = grpc.insecure_channel(address).unary_unary(
            f"/{service.full_name}/GetStatus", response_deserializer=GetMessageClass(status.output_type).FromString
        )
        self._rounds, self._run_dir, self._published = rounds, run_dir, published
        self._steps = 0

    def requests(self, method: MethodDescriptor, chance: random.Random) -> list[Message]:
        """The messages of one call."""
        version = self._status(b"", timeout=CALL_S).policy_version
        right: dict[str, Any] = {"fence": FENCE, "policy_version": version, "chunk": SAMPLES}
        right |= {"groups": GROUPS, "sampling": SAMPLING, "mode": chance.choice(PAUSES)}
        match method.name:
            case "TrainStep":
                return [
                    trainer_pb2.TrainStepRequest(header=self._step(version)),
                    trainer_pb2.TrainStepRequest(chunk=SAMPLES),
                ]
            case "RunPhase":
                right["phase"], right["round"] = self._rounds.next(max(version, self._published.policy_version), chance)
            case "SaveCheckpoint" | "FinishCheckpoint" | "ExportModel":
                right["path"] = str(self._run_dir / f"near-{method.name}-{chance.randrange(2)}")
            case "RestorePolicy":
                saved = self._run_dir / "near-SaveCheckpoint-0"
                right["path"] = str(saved) if saved.exists() else ""
            case "LoadPublishedWeights":
                right |= {"folder": self._published.disk_folder, "round_id": self._published.round_id}
                right["policy_version"] = self._published.policy_version
        given = {name: right[name] for name in method.input_type.fields_by_name if name in right}
        return [GetMessageClass(method.input_type)(**given)]

    def _step(self, version: int) -> trainer_pb2.TrainStepHeader:
        self._steps += 1
        numbers = {"policy_version": version, "num_updates": 1, "num_samples": 2}
        return trainer_pb2.TrainStepHeader(step_id=f"near-{self._steps}", fence=FENCE, **numbers)
