"""Weight-sync rounds as a coordinator runs them, on any participants."""

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Rendezvous
from weightsync.plans.participants import Participants
from weightsync.round.phases import Phase, rules_of

CALL_S = 60.0

# A participant: runs one phase and returns its report.
RunPhase = Callable[[Phase, pb.Round], Any]


def service_at(channel: grpc.Channel) -> RunPhase:
    """Make a participant of the RoundService at the other end of a channel."""
    stub = weights_pb2_grpc.RoundServiceStub(channel)
    return lambda phase, round_: stub.RunPhase(pb.RunPhaseRequest(phase=phase, round=round_), timeout=CALL_S)


def new_round(
    group: Rendezvous,
    version: int,
    trainer: Parallel,
    replicas: Mapping[str, Parallel],
    *,
    wait_s: float = 0.0,
    **changes: Any,
) -> pb.Round:
    """Make a round in the group's epoch.

    Args:
        wait_s: how long to wait for an epoch of which all are members.
        changes: fields of the round.
    """
    fields: dict[str, Any] = {
        "round_id": uuid.uuid4().hex,
        "policy_version": version,
        "group": group.group,
        "trainer": trainer.to_proto(),
        "replicas": [pb.ReplicaSpec(name=name, parallel=layout.to_proto()) for name, layout in replicas.items()],
        "install_mode": pb.INSTALL_MODE_IN_PLACE,
        "pause_mode": pb.PAUSE_MODE_DRAIN,
        "bucket_bytes": 10_000,
        "formation_timeout_s": 20.0,
        "transfer_timeout_s": 20.0,
    }
    round_ = pb.Round(**fields | changes)
    members = group.wait_for(Participants.of_round(round_).slots, wait_s) if wait_s else group.snapshot()
    round_.epoch = members.epoch
    return round_


def outcomes(
    participants: Mapping[str, RunPhase], phase: Phase, rounds: pb.Round | Mapping[str, pb.Round]
) -> dict[str, Any]:
    """Run one phase on all concurrently.

    Args:
        rounds: the round, or each participant's own message of it.
    Returns: reports, or errors, by participant.
    """
    with ThreadPoolExecutor(len(participants)) as pool:
        futures = {
            name: pool.submit(run, phase, rounds if isinstance(rounds, pb.Round) else rounds[name])
            for name, run in participants.items()
        }
    return {name: future.exception() or future.result() for name, future in futures.items()}


def run_phase(participants: Mapping[str, RunPhase], phase: Phase, round_: pb.Round) -> dict[str, Any]:
    """Run one phase on all. Returns: reports. Raises: the first participant's error, with the others' as notes."""
    answers = outcomes(participants, phase, round_)
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, BaseException)}
    for error in list(failed.values())[:1]:
        for name, answer in failed.items():
            error.add_note(f"{pb.RoundPhase.Name(phase)} on {name}: {answer}")
        raise error
    return answers


def run_round(participants: Mapping[str, RunPhase], round_: pb.Round) -> dict[int, dict[str, Any]]:
    """Run every phase that the round has. Returns: reports by phase, by participant."""
    rules = rules_of(staged=round_.install_mode == pb.INSTALL_MODE_STAGED)
    return {rule.phase: run_phase(participants, rule.phase, round_) for rule in rules}
