"""Whole rounds over real replicas, whoever the trainer is."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from servicekit.rpc.limits import CHANNEL_OPTIONS
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tests.integration.sync.replicas import CALL_S, Replicas
from weightsync.group.rendezvous import Rendezvous
from weightsync.layouts.layout import Parallel
from weightsync.plans.participants import Participants
from weightsync.round.phases import PHASES

SLOTS_S = 30.0

RunPhase = Callable[[pb.RoundPhase.ValueType, pb.Round], Any]


def run_round(
    trainer: Sequence[RunPhase], parallel: Parallel, replicas: Replicas, version: int, **fields: object
) -> list[pb.PhaseReport]:
    """Every phase on everybody at once.

    Args: trainer: one callable per trainer process that is to be told. fields: of pb.Round.
    Returns: TRANSFER's reports of the receivers.
    """
    rendezvous = Rendezvous(replicas.redis_url, replicas.group)
    round_ = pb.Round(
        round_id=uuid.uuid4().hex,
        policy_version=version,
        group=replicas.group,
        trainer=parallel.to_proto(),
        replicas=[pb.ReplicaSpec(name=name, parallel=layout.to_proto()) for name, layout in replicas.layouts.items()],
        install_mode=pb.INSTALL_MODE_IN_PLACE,
        pause_mode=pb.PAUSE_MODE_DRAIN,
        bucket_bytes=10_000,
        formation_timeout_s=20.0,
        transfer_timeout_s=20.0,
    )
    round_.MergeFrom(pb.Round(**fields))  # type: ignore[arg-type]
    round_.epoch = rendezvous.wait_for(Participants.of_round(round_).slots, SLOTS_S).epoch
    channels = [grpc.insecure_channel(address, options=CHANNEL_OPTIONS) for address in replicas.addresses.values()]
    stubs = [weights_pb2_grpc.RoundServiceStub(channel) for channel in channels]
    received: list[pb.PhaseReport] = []
    with ThreadPoolExecutor(len(trainer) + len(stubs)) as pool:
        for phase in PHASES:
            if phase == pb.ROUND_PHASE_PAUSE and round_.install_mode == pb.INSTALL_MODE_STAGED:
                continue  # COMMIT pauses
            request = pb.RunPhaseRequest(phase=phase, round=round_)
            own = [pool.submit(run, phase, round_) for run in trainer]
            theirs = [pool.submit(stub.RunPhase, request, timeout=CALL_S) for stub in stubs]
            failures = [str(error) for future in [*own, *theirs] if (error := future.exception(timeout=CALL_S))]
            if failures:  # the trainer's first: receivers that waited for it say less
                raise AssertionError("\n".join(failures))
            reports = [rank for future in theirs for rank in future.result().reports]
            if phase == pb.ROUND_PHASE_TRANSFER:
                received = reports
    for channel in channels:
        channel.close()
    return received
