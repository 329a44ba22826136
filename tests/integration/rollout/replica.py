"""A replica as a user runs it: its own process, a real Redis, gRPC; and a trainer rank that sends it weights."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from servicekit.redis.registry import Registry
from servicekit.rpc.limits import CHANNEL_OPTIONS
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tests.kit.waiting import until
from weightsync.group.rendezvous import Rendezvous
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.round_plan import source_layout
from weightsync.round.phases import PHASES
from weightsync.transfer.hf_files import load_shards
from weightsync.transfer.session import SyncMember

START_S = 150.0
CALL_S = 60.0


class Replica:
    """`python -m rollout_service`, announced and reachable."""

    module = "rollout_service"

    def __init__(
        self, folder: Path, model: Path, redis_url: str, variables: dict[str, str] | None = None, **rollout: Any
    ) -> None:
        self.name = "rollout-0"
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.redis_url = redis_url
        self.model = model
        self.tensor_parallel = int(rollout.get("tensor_parallel", 1))
        self.log = folder / "rollout-0.log"
        config = {
            "model": {"path": str(model)},
            "data": {"train": str(folder / "train.jsonl")},
            "rollout": {"max_total_tokens": 20000, **rollout},
        }
        self.config = path = folder / "config.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        own = {"REDIS_URL": redis_url, "TANDEM_RUN_ID": self.run_id, "TANDEM_RUN_DIR": str(folder)}
        # Another name of where it listens, so that a test sees which of the two is announced.
        own["TANDEM_ADVERTISE_HOST"] = "localhost"
        self._variables = own | (variables or {}) | {"OMP_NUM_THREADS": "1", "TANDEM_TEST_HOOKS": "1"}
        self.process = self._start(self.log, {})

    def start_worker(self, host: int, address: str, within: Sequence[str] = ()) -> "Worker":
        """A further host of the engine, at another address of this machine; `within`: a command that runs its own."""
        log = self.log.with_name(f"{self.name}-host-{host}.log")
        return Worker(self._start(log, at(address) | {"TANDEM_HOST_INDEX": str(host)}, within), log)

    def _start(self, path: Path, variables: dict[str, str], within: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        with path.open("wb") as log:
            return subprocess.Popen(
                [*within, sys.executable, "-m", self.module, "--config", str(self.config), "--name", self.name],
                env=os.environ | self._variables | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_up(self) -> "Replica":
        """Returns once the replica is announced."""
        registry = Registry(self.redis_url, self.run_id)
        try:
            until(lambda: bool(registry.list("rollout")) or self.process.poll() is not None, START_S, "a replica")
            records = registry.list("rollout")
        finally:
            registry.close()
        if not records:
            raise RuntimeError(self.log.read_text(encoding="utf-8")[-5000:])
        self.address = records[0].address
        self.metrics_address = records[0].metrics_address
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.rounds = weights_pb2_grpc.RoundServiceStub(self.channel)
        return self

    def generate(
        self,
        prompts: list[list[int]],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int = 16,
        stop: tuple[int, ...] = (),
        version: int = 0,
    ) -> list[rollout_pb2.GroupResult]:
        """Groups in the order of `prompts`."""
        request = rollout_pb2.GenerateGroupsRequest(
            groups=[
                rollout_pb2.PromptGroup(group_id=str(i), prompt_ids=ids, num_completions=n)
                for i, ids in enumerate(prompts)
            ],
            sampling=rollout_pb2.SamplingParams(
                temperature=temperature, top_p=1.0, top_k=-1, max_new_tokens=max_new_tokens, stop_token_ids=stop
            ),
            policy_version=version,
        )
        replies = list(self.stub.GenerateGroups(request, timeout=CALL_S))
        by_id = {group.group_id: group for reply in replies for group in reply.groups}
        return [by_id[str(i)] for i in range(len(prompts))]

    def phase(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> pb.RunPhaseResponse:
        response: pb.RunPhaseResponse = self.rounds.RunPhase(
            pb.RunPhaseRequest(phase=phase, round=round_), timeout=CALL_S
        )
        return response

    def status(self) -> rollout_pb2.GetStatusResponse:
        status: rollout_pb2.GetStatusResponse = self.stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=10.0)
        return status

    def family(self) -> list[psutil.Process]:
        """The service's child processes, children of children too."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def close(self) -> None:
        """Ends what is left: asked first, so that it removes its temporary folder."""
        end(self.process)


@dataclass(frozen=True)
class Worker:
    """`python -m rollout_service` with TANDEM_HOST_INDEX > 0."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def close(self) -> None:
        """Ends what is left."""
        end(self.process)


def at(address: str) -> dict[str, str]:
    """The environment of a process that listens, and is reached, at an address."""
    return {"TANDEM_BIND_HOST": address, "TANDEM_ADVERTISE_HOST": address}


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, and SIGKILL to its whole session if that does not help."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


class Trainer:
    """Rank 0 of a trainer without parallelism, with a checkpoint's weights; the others reach it at `host`."""

    def __init__(self, replica: Replica, host: str = "127.0.0.1") -> None:
        self._replica = replica
        self._group = f"tandem:{replica.run_id}"
        self._spec = ModelSpec.from_folder(replica.model)
        self._layout = source_layout(self._spec, Parallel())
        shapes = self._layout.parameters_of(0)
        self._tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.member = SyncMember(
            spec=self._spec,
            slot="trainer/0",
            parallel=Parallel(),
            tensors=self._tensors,
            redis_url=replica.redis_url,
            group=self._group,
            host=host,
            lease_ttl_s=15.0,
        )
        self.member.start()

    def load(self, model: Path) -> None:
        load_shards(model, self._spec, self._layout, 0, self._tensors)

    def round(self, version: int, **fields: Any) -> pb.Round:
        epoch = Rendezvous(self._replica.redis_url, self._group).snapshot().epoch
        defaults: dict[str, Any] = {
            "round_id": uuid.uuid4().hex,
            "policy_version": version,
            "group": self._group,
            "epoch": epoch,
            "trainer": Parallel().to_proto(),
            "replicas": [
                pb.ReplicaSpec(
                    name=self._replica.name, parallel=Parallel(tensor=self._replica.tensor_parallel).to_proto()
                )
            ],
            "install_mode": pb.INSTALL_MODE_IN_PLACE,
            "pause_mode": pb.PAUSE_MODE_DRAIN,
            "bucket_bytes": 1 << 20,
            "formation_timeout_s": 20.0,
            "transfer_timeout_s": 20.0,
        }
        return pb.Round(**defaults | fields)

    def both(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> pb.RunPhaseResponse:
        """A phase on the trainer and on the replica at once."""
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(self.member.run_phase, phase, round_)
            reply = self._replica.phase(phase, round_)
            own.result(timeout=CALL_S)
        return reply

    def sync(self, version: int, **fields: Any) -> dict[int, pb.RunPhaseResponse]:
        """A whole round."""
        round_ = self.round(version, **fields)
        return {phase: self.both(phase, round_) for phase in PHASES}
