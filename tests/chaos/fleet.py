"""A fleet of real processes to do harm to: two trainer ranks, three replicas, Redis, a coordinator per publication.

Processes come from a fork server that has imported torch and the services once. They stay from cell to cell; what a
cell has killed it starts again.
"""

import json
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import grpc

from servicekit.errors import TandemError, from_rpc_error
from servicekit.redis.registry import Registry
from servicekit.rpc.limits import CHANNEL_OPTIONS
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.chaos.gates import Gate
from tests.chaos.policy import expected_checksums
from tests.kit.processes import fork_server
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until
from tests.unit.trainer.batches import message
from tools.bench_sync.whole_groups import prompt_group, submission
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous

REPLICAS = ("rollout-0", "rollout-1", "rollout-2")
TRAINERS = ("trainer-0", "trainer-1")
RUN_ID = "chaos"
START_S = 60.0
CALL_S = 10.0
# What does not generate within it is paused.
PAUSE_S = 1.0
# A publication may take three rounds, each with its deadlines (of seconds here), and the wait for those who are lost.
PUBLISH_S = 60.0

_fork_server = fork_server("tests.chaos.trainer", "tests.chaos.replica")


def _state(task: Path) -> str:
    """Of a thread, by its folder in /proc: "T" if it is stopped, "X" if it is gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class ChaosFleet:
    """The processes by name, and what a test asks of them.

    Args:
        size: of the policy (policy.py).
        as_shipped: every deadline, lease and message size is what a run has that says nothing of them.
    """

    def __init__(
        self, folder: Path, redis: RedisProcess, *, size: str = "tiny", as_shipped: bool = False, **sync: Any
    ) -> None:
        self.folder, self.redis, self.size, self.as_shipped = folder, redis, size, as_shipped
        self.version = 0
        self._contents: dict[int, int] = {}  # the version whose numbers a version has, where a run was restarted
        self.processes: dict[str, ForkServerProcess] = {}
        self.pids: set[int] = set()  # of all processes that there have been
        self._sync = sync
        self._first_sync = sync
        self._serial = 0
        self.registry = Registry(redis.url, RUN_ID)
        self._channels: dict[str, grpc.Channel] = {}
        self._addresses: dict[str, str] = {}

    # ---- life ----

    def start(self) -> None:
        """Everyone, at the current version, seeded."""
        self.start_trainer()
        for name in REPLICAS:
            self.start_replica(name)
        self.wait_announced()
        outcome = self.publish()
        assert outcome.get("serving") == list(REPLICAS), f"the fleet did not come up: {outcome}\n{self.logs()}"

    def start_trainer(self) -> None:
        """Both ranks, from a "checkpoint" of the current version; what is left of the old ones is ended first."""
        for name in TRAINERS:
            self.end(name)
        for rank, name in enumerate(TRAINERS):
            self._start(name, "trainer", rank=rank, policy_version=self.version)

    def start_replica(self, name: str) -> None:
        self.end(name)
        self._start(name, "replica")

    def start_coordinator(
        self,
        name: str = "coordinator",
        *,
        serving: list[str] | None = None,
        checkpoint: Path | None = None,
        seed_when: Path | None = None,
        replicas_seed: list[str] | None = None,
    ) -> Path:
        """Begins a publication of the current version; with `serving`, the seeding of the others.

        With `seed_when`, it seeds late joiners after its publication, as soon as that file is there. With
        `replicas_seed`, it lets replicas do so until these serve and no other is announced.
        With `checkpoint`, of the current version, the coordinator of a restarted run: it takes the fleet over first.
        Returns: the file that its result will be in.
        """
        self._serial += 1
        result = self.folder / f"{name}-{self._serial}.json"
        version = self.version
        self._start(
            name,
            "coordinator",
            policy_version=version,
            result=str(result),
            serving=serving or [],
            disk_folder=str(self.folder / "weights"),
            checkpoint="" if checkpoint is None else str(checkpoint),
            seed_when="" if seed_when is None else str(seed_when),
            replicas_seed=replicas_seed,
        )
        return result

    def _start(self, name: str, kind: str, **settings: Any) -> None:
        common = {
            "log": str(self.folder / f"{name}.log"),
            "folder": str(self.folder),
            "name": name,
            "size": self.size,
            "as_shipped": self.as_shipped,
            # Services that read another file than the others of their run would be refused.
            "config": self._config(self._sync if kind == "coordinator" else self._first_sync),
            "environment": {
                "REDIS_URL": self.redis.url,
                "TANDEM_RUN_ID": RUN_ID,
                "TANDEM_RUN_DIR": str(self.folder),
            },
        }
        process = _fork_server.Process(target=_run, args=(kind, {**common, **settings}), name=name, daemon=True)
        process.start()
        self.processes[name] = process
        self.pids.add(self.pid(name))

    def pid(self, name: str) -> int:
        """Of a process that was started."""
        pid = self.processes[name].pid
        assert pid is not None
        return pid

    def has_ended(self, name: str) -> bool:
        """Whether a process that was started is no more."""
        return self.processes[name].exitcode is not None

    def _config(self, changed: dict[str, Any]) -> dict[str, Any]:
        short = {
            "bucket_mib": 0.004,
            "formation_timeout_s": 2.0,
            "transfer_timeout_s": 2.0,
            "probe_timeout_s": 1.0,
            "lease_ttl_s": 1.2,
        }
        sync = {"transport": "collective", **({} if self.as_shipped else short), **changed}
        # More than the 2 s after which an idle rank 0 sends the others a sign of life.
        trainer = {"tensor_parallel": 2, **({} if self.as_shipped else {"collective_timeout_s": 4.0})}
        return {
            "run": {"name": RUN_ID, "startup_timeout_s": START_S},
            "model": {"path": str(self.folder)},
            "data": {"train": str(self.folder / "unused.jsonl")},
            "trainer": trainer,
            "rollout": {"replicas": len(REPLICAS)},
            "sync": sync,
        }

    def use(self, **sync: Any) -> None:
        """Settings of the publications from here on."""
        self._sync = {**self._sync, **sync}

    def use_as_at_first(self) -> None:
        """The settings that the fleet was made with: cells share it, and must not inherit from each other."""
        self._sync = self._first_sync

    def end(self, name: str) -> None:
        """SIGKILL, whatever state it is in; nothing if there is no such process."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.join(timeout=10)

    def close(self) -> None:
        for name in list(self.processes):
            self.end(name)
        for channel in self._channels.values():
            channel.close()
        self.registry.close()

    # ---- harm ----

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """To a process or to Redis; a frozen one has stopped, which on busy cores takes some milliseconds."""
        pid = self.redis.pid if name == "redis" else self.pid(name)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            until(
                lambda: all(_state(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()),
                10.0,
                f"{name} stops",
            )

    def gate(self, name: str) -> Gate:
        return Gate(self.folder, name)

    # ---- questions ----

    def wait_announced(self) -> None:
        """Until trainer and replicas have announced themselves as the processes that run now."""
        self.registry.wait_for("trainer", ["trainer"], START_S)
        self.registry.wait_for("rollout", REPLICAS, START_S)
        until(lambda: all(map(self._answers, (*REPLICAS, "trainer"))), START_S)

    def announced(self, name: str) -> bool:
        """Whether a process that was just started is the one that answers under its name."""
        return self._answers(name) and self.status(name).state == pb.REPLICA_STATE_UNSEEDED

    def _answers(self, name: str) -> bool:
        try:
            role = name.partition("-")[0]
            self._addresses |= {record.name: record.address for record in self.registry.list(role)}
            if name == "trainer":
                return self.trainer_status().policy_version == self.version
            self.status(name)
        except (TandemError, LookupError):
            return False
        return True

    def _channel(self, name: str) -> grpc.Channel:
        """To where the service was announced when wait_announced() last looked; Redis may be away now."""
        address = self._addresses[name]
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def trainer_status(self) -> trainer_pb2.GetStatusResponse:
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel("trainer"))
        status: trainer_pb2.GetStatusResponse = _call(stub.GetStatus, trainer_pb2.GetStatusRequest())
        return status

    def status(self, name: str) -> rollout_pb2.GetStatusResponse:
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(name))
        status: rollout_pb2.GetStatusResponse = _call(stub.GetStatus, rollout_pb2.GetStatusRequest())
        return status

    def train_step(self) -> None:
        """The trainer goes to the next version."""
        lease = CoordinatorLease(Rendezvous(self.redis.url, f"tandem:{RUN_ID}"), CALL_S)
        lease.claim(START_S)  # ranks do as the newest coordinator says only
        header = trainer_pb2.TrainStepHeader(
            step_id=uuid.uuid4().hex, policy_version=self.version, num_updates=1, num_samples=2, fence=lease.fence
        )
        requests = [trainer_pb2.TrainStepRequest(header=header), trainer_pb2.TrainStepRequest(chunk=message())]
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel("trainer"))
        try:
            reply = _call(stub.TrainStep, iter(requests))
        finally:
            lease.close()
        self.version += 1
        assert reply.policy_version == self.version

    def publish(self, name: str = "coordinator", **options: Any) -> dict[str, Any]:
        """A publication from its beginning to its end; arguments as start_coordinator()'s."""
        return self.result_of(self.start_coordinator(name, **options))

    def save(self) -> Path:
        """A "checkpoint" of the current version."""
        folder = self.folder / f"checkpoint-{self.version}"
        folder.mkdir(exist_ok=True)
        (folder / "version").write_text(str(self.version))
        return folder

    def take_over(self, checkpoint: Path) -> dict[str, Any]:
        """A publication by the coordinator of a run that goes on from a checkpoint of the current version."""
        content = self._contents.get(self.version, self.version)
        said = self.publish(checkpoint=checkpoint)
        if "policy_version" in said:
            self.version = said["policy_version"]
            self._contents[self.version] = content
        return said

    def is_in_transfer(self, name: str) -> bool:
        """Whether a rank is in TRANSFER (as its process says in a file)."""
        return (self.folder / f"{name}.transfer").exists()

    def phase_of(self, name: str) -> str:
        """The phase that a rank has begun last (as its process says in a file); empty: none."""
        file = self.folder / f"{name}.phase"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def round_is_open(self, name: str) -> bool:
        """Whether a replica is in a round (as its process says in a file)."""
        return (self.folder / f"{name}.round").exists()

    def result_of(self, result: Path, timeout_s: float = PUBLISH_S) -> dict[str, Any]:
        """What a coordinator has said, once it has."""
        until(result.exists, timeout_s)
        said = json.loads(result.read_text())
        answer: dict[str, Any] = said.get("result", said)
        return answer

    def mixture(self, name: str) -> str:
        """What is wrong with what a replica has and serves; "" for nothing.

        A replica that serves must hold exactly the weights of its version; one that does not must refuse.
        """
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(name))
        for _ in range(2):  # one that refuses no longer may have been let go on just now
            status = self.status(name)
            if status.state == pb.REPLICA_STATE_SERVING:
                reply = _call(stub.GetChecksums, rollout_pb2.GetChecksumsRequest())
                content = self._contents.get(status.policy_version, status.policy_version)
                expected = expected_checksums(content, self.size)
                wrong = [each for each, digest in expected.items() if reply.ranks[0].checksums[each] != digest]
                return f"{name} at version {status.policy_version}: {wrong} are others" if wrong else ""
            if self._refuses(stub, status.policy_version):
                return ""
        return f"{name} is {status.state} and generates"

    def generates(self, name: str) -> bool:
        """Whether a replica answers a request for the version that it says it serves."""
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channel(name))
        return not self._refuses(stub, self.status(name).policy_version)

    def _refuses(self, stub: rollout_pb2_grpc.RolloutServiceStub, version: int) -> bool:
        request = submission([prompt_group("g", [1])], version, max_new_tokens=1)
        try:
            return not any(response.groups for response in stub.Generate(iter([request]), timeout=PAUSE_S))
        except grpc.RpcError as error:  # in a pause it waits
            return error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED)

    def logs(self) -> str:
        """The end of every process's log."""
        texts = {path.name: path.read_text(errors="replace")[-2500:] for path in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())


@contextmanager
def chaos_fleet(**options: Any) -> Iterator[ChaosFleet]:
    """A fleet that has begun, with a folder and a Redis of its own; what fails inside brings the processes' logs."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, RedisProcess() as redis:
        fleet = ChaosFleet(Path(folder), redis, **options)
        try:
            fleet.start()
            yield fleet
        except BaseException as error:
            error.add_note(fleet.logs())
            raise
        finally:
            fleet.close()


def _run(kind: str, settings: dict[str, Any]) -> None:
    # Imported in the process that it is for.
    from tests.chaos.members import run

    run(kind, settings)


def _call(method: Callable[..., Any], request: Any) -> Any:
    try:
        return method(request, timeout=CALL_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
