"""What all processes of a chaos test have in common: how they begin and end, and where a test can stop them."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from prometheus_client import REGISTRY

from servicekit.environment import ServiceEnvironment
from servicekit.logs import configure_logging, get_logger
from servicekit.redis import client as redis_client
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_config.schema import RunConfig
from tests.chaos.gates import Gate
from weightsync.round import deadlines
from weightsync.round.phases import Phase, name_of
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.session import SyncMember
from weightsync.transfer.transports import disk
from weightsync.transfer.transports.disk_files import write_rank

# Of services that answer with nothing to do, on two cores that others use too.
REDIS_TIMEOUT_S = 0.5
ROUND_MARGIN_S = 0.5


def run(kind: str, settings: dict[str, Any]) -> None:
    """A process's main: tests.chaos.<kind>.main."""
    if kind != "trainer":
        # The fork server has imported the trainer, whose metrics have some of the others' names.
        for collector in list(REGISTRY._collector_to_names):
            REGISTRY.unregister(collector)
    importlib.import_module(f"tests.chaos.{kind}").main(settings)


def begin(settings: Mapping[str, Any]) -> tuple[RunConfig, ServiceEnvironment]:
    """The beginning of every process: its log, its environment, deadlines as short as the test's rounds.

    settings["as_shipped"]: leave all deadlines as they are.
    """
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    configure_logging(str(settings["name"]))
    torch.set_num_threads(1)
    if not settings["as_shipped"]:
        redis_client.ANSWER_TIMEOUT_S = redis_client.CONNECT_TIMEOUT_S = REDIS_TIMEOUT_S
        deadlines.SILENCE_MARGIN_S = deadlines.COMMAND_MARGIN_S = ROUND_MARGIN_S
    get_logger(__name__).info("process begins", pid=os.getpid())
    return RunConfig.model_validate(settings["config"]), ServiceEnvironment.model_validate(settings["environment"])


class GatedMember(SyncMember):
    """The real member, with a gate at the entry of each phase."""

    gate: Gate
    round_file: Path  # exists while a round is open here
    transfer_file: Path  # exists while a transfer is under way here
    phase_file: Path  # has the name of the phase that began last

    def run_phase(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        name = name_of(phase)
        _Messages.number = 0
        self.phase_file.write_text(name, encoding="utf-8")
        if name == "prepare":
            self.round_file.touch()
        if name != "transfer":
            self.gate.at(name)
        else:
            self.transfer_file.touch()
        try:
            report = super().run_phase(phase, round_)
        finally:
            self.transfer_file.unlink(missing_ok=True)
        if name in ("commit", "abort"):
            self.round_file.unlink(missing_ok=True)
        return report


class _Messages:
    """Counts the messages of the phase under way."""

    number = 0


def set_up_gates(folder: Path, name: str) -> Gate:
    """Gates at the phases and at every message that this process starts to send, receive, write or read."""
    gate = Gate(folder, name)
    GatedMember.gate = gate
    GatedMember.round_file = folder / f"{name}.round"
    GatedMember.transfer_file = folder / f"{name}.transfer"
    GatedMember.phase_file = folder / f"{name}.phase"
    for file in (GatedMember.round_file, GatedMember.transfer_file, GatedMember.phase_file):
        file.unlink(missing_ok=True)

    def gated(start: Callable[..., Any]) -> Callable[..., Any]:
        def at_gate(*args: Any, **kwargs: Any) -> Any:
            gate.at("transfer", _Messages.number)
            _Messages.number += 1
            return start(*args, **kwargs)

        return at_gate

    Communicator.send = gated(Communicator.send)  # type: ignore[method-assign]
    Communicator.receive = gated(Communicator.receive)  # type: ignore[method-assign]
    mock.patch.object(disk, "write_rank", gated(write_rank)).start()
    disk._fill = gated(disk._fill)
    return gate


def leave(code: int) -> None:
    """End without waiting for threads that a frozen peer holds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
