"""Real SGLang replicas with the calls that tests make, and a trainer without Megatron that sends them weights."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from servicekit.rpc.limits import CHANNEL_OPTIONS
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_config.schema import RunConfig
from tests.kit.fleet import Fleet
from tests.kit.processes import Services
from tests.kit.round import CALL_S, RunPhase, new_round, run_phase, run_round, service_at
from tools.bench_sync.whole_groups import Sampled, SampledGroup, prompt_group, submission, whole_groups
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Rendezvous
from weightsync.model.spec import ModelSpec

SLOTS_S = 30.0
Checksums = dict[str, dict[str, str]]  # by slot, by parameter


def configuration(model: Path, run_id: str, dtype: str = "float32", **sections: dict[str, Any]) -> RunConfig:
    """Make a run's configuration for a model folder."""
    fixed: dict[str, Any] = {
        "run": {"name": run_id},
        "model": {"path": model, "dtype": dtype},
        "data": {"train": model / "unused.jsonl"},
        "sync": {"bucket_mib": 0.01},
    }
    return RunConfig.model_validate(fixed | sections)


def at(address: str) -> dict[str, str]:
    """Return the environment of a process that listens at, and is reached at, an address."""
    return {"TANDEM_BIND_HOST": address, "TANDEM_ADVERTISE_HOST": address}


def in_a_pod_at(address: str) -> dict[str, str]:
    """Return the environment of a process as a pod with this address has it: it listens on all of its addresses."""
    return {"TANDEM_BIND_HOST": "*", "TANDEM_ADVERTISE_HOST": address}


class Replica:
    """One replica of a run: a process of `services` that the caller has started."""

    def __init__(self, services: Services, name: str, config: RunConfig) -> None:
        self.services, self.name, self.config, self.model = services, name, config, config.model.path
        self.layout = Parallel(tensor=config.rollout.tensor_parallel, expert=config.rollout.expert_parallel)
        self.redis_url, self.run_id = services.redis_url, services.run_id
        self.process = services.processes[name]
        self.log = services.log(name)

    def start_worker(self, host: int, where: Mapping[str, str], within: Sequence[str] = ()) -> "Replica":
        """Start a further host of the engine; `where`: at() of another address; `within`: see Services.start()."""
        name, variables = f"{self.name}-host-{host}", {**where, "TANDEM_HOST_INDEX": str(host)}
        self.services.start(name, ["rollout_service", "--name", self.name], self.config, variables, within)
        return Replica(self.services, name, self.config)

    def wait_up(self) -> "Replica":
        """Wait until the replica is announced. Raises: RuntimeError, with the log's end: it has ended instead."""
        record = self.services.record_of("rollout", self.name)
        self.address, self.metrics_address = record.address, record.metrics_address
        self.channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.phase = service_at(self.channel)
        return self

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int = 16,
        stop: tuple[int, ...] = (),
        version: int = 0,
        seed: int | None = None,
        texts: Sequence[str] = (),
        **sampling: Any,
    ) -> list[SampledGroup]:
        """Sample `n` completions per prompt; group i has the seed `seed` + 100 i.

        Args:
            sampling: other SamplingParams.
        Returns: the groups, in the order of `prompts`.
        """
        params = {"stop_token_ids": stop, "stop": texts, "temperature": temperature} | sampling
        groups = [
            prompt_group(str(i), ids, n, seed=None if seed is None else seed + 100 * i) for i, ids in enumerate(prompts)
        ]
        request = submission(groups, version, max_new_tokens=max_new_tokens, **params)
        return whole_groups(request, list(self.stub.Generate(iter([request]), timeout=CALL_S)))

    def greedy(self, prompts: Sequence[list[int]], version: int, num_tokens: int) -> list[Sampled]:
        """Generate one greedy completion per prompt, in order."""
        groups = self.generate(prompts, temperature=0.0, max_new_tokens=num_tokens, version=version)
        return [group.completions[0] for group in groups]

    def status(self) -> rollout_pb2.GetStatusResponse:
        """Call GetStatus."""
        status: rollout_pb2.GetStatusResponse = self.stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=CALL_S)
        return status

    def checksums(self) -> list[dict[str, str]]:
        """Return the digests of each rank, by parameter."""
        reply = self.stub.GetChecksums(rollout_pb2.GetChecksumsRequest(), timeout=CALL_S)
        return [dict(rank.checksums) for rank in reply.ranks]

    def family(self) -> list[psutil.Process]:
        """Return the service's child processes, and theirs."""
        return self.services.family(self.name)

    def close(self) -> None:
        """End the run's remaining processes."""
        self.services.close(patience_s=40.0)


def lone_replica(
    folder: Path,
    model: Path,
    redis_url: str,
    variables: Mapping[str, str] | None = None,
    module: str = "rollout_service",
    spawned: bool = False,
    **rollout: Any,
) -> Replica:
    """Start the only replica of a new run.

    Args:
        variables: of its processes.
        spawned: its processes are new ones, as users start them, not forks.
        rollout: settings of that section.
    """
    # Another name of the address at which it listens, so that a test sees which of the two is announced.
    own = {"TANDEM_ADVERTISE_HOST": "localhost", **(variables or {})}
    services = Services(redis_url, folder, f"test-{uuid.uuid4().hex[:8]}", own)
    config = configuration(model, services.run_id, "float32", rollout={"max_total_tokens": 20000, **rollout}, sync={})
    service = None if spawned else "rollout_service"
    services.start("rollout-0", [module, "--name", "rollout-0"], config, service=service)
    return Replica(services, "rollout-0", config)


class Replicas(dict[str, Replica]):
    """Replicas of one run, by name.

    Args:
        layouts: their parallel sizes.
        dtype: type of their weights.
        module: what runs them; see Services.start_rollout().
        tokens: that the KV cache of each holds.
    """

    def __init__(
        self,
        services: Services,
        model: Path,
        layouts: dict[str, Parallel],
        dtype: str = "float32",
        module: str = "rollout_service",
        tokens: int = 1024,
    ) -> None:
        self._services, self.model, self.layouts = services, model, layouts
        self.group = Rendezvous(services.redis_url, f"tandem:{services.run_id}")
        for name, layout in layouts.items():
            rollout = {"tensor_parallel": layout.tensor, "expert_parallel": layout.expert, "max_total_tokens": tokens}
            config = configuration(model, services.run_id, dtype, rollout=rollout)
            services.start_rollout(name, config, module)
            self[name] = Replica(services, name, config)

    def wait_up(self) -> None:
        """Wait until all are announced. Raises: RuntimeError, with the log's end: a process has ended instead."""
        for replica in self.values():
            replica.wait_up()
        self._ranks = {
            f"{name}/{rank}": weights_pb2_grpc.ShardReceiverServiceStub(grpc.insecure_channel(address))
            for name in self
            for rank, address in enumerate(self._services.sockets_of(name))
        }
        assert len(self._ranks) == sum(layout.tensor for layout in self.layouts.values())

    @property
    def participants(self) -> dict[str, RunPhase]:
        """The replicas as participants of a round."""
        return {name: replica.phase for name, replica in self.items()}

    def round(self, version: int, trainer: Parallel, **fields: Any) -> pb.Round:
        """Make a round of a trainer of this layout and all replicas, once their ranks are members."""
        return new_round(self.group, version, trainer, self.layouts, wait_s=SLOTS_S, **fields)

    def sync(self, folder: Path, trainer: Parallel, version: int, **fields: Any) -> list[pb.PhaseReport]:
        """Run a whole round from a trainer of any layout without Megatron, which has the weights of a folder.

        Returns: TRANSFER's reports of the receivers.
        """
        with self.trainer(folder, trainer) as fleet:
            return self.received(run_round(fleet.participants, self.round(version, trainer, **fields)))

    @contextlib.contextmanager
    def trainer(self, folder: Path, trainer: Parallel) -> Iterator[Fleet]:
        """Open a trainer of any layout without Megatron, which has joined and has the weights of a folder."""
        spec, url, group = ModelSpec.from_folder(folder), self._services.redis_url, self.group.group
        with Fleet(url, spec, trainer, self.layouts, group=group, services=self.participants) as fleet:
            fleet.load(folder)
            yield fleet

    def received(self, reports: dict[int, dict[str, Any]]) -> list[pb.PhaseReport]:
        """Select TRANSFER's reports of the receivers."""
        return [rank for name in self for rank in reports[pb.ROUND_PHASE_TRANSFER][name].reports]

    def checksums(self) -> Checksums:
        """Return the digests of all ranks, by slot and parameter."""
        return {
            slot: dict(stub.GetChecksums(pb.GetChecksumsRequest(), timeout=CALL_S).checksums)
            for slot, stub in self._ranks.items()
        }

    def poison(self) -> None:
        """Fill the weights of all ranks with NaN."""
        for stub in self._ranks.values():
            assert stub.PoisonWeights(pb.PoisonWeightsRequest(), timeout=CALL_S).num_tensors > 10

    def truth(self, folder: Path) -> Checksums:
        """Load a Hugging Face folder with SGLang's own loader. Returns: the digests that a sync must give."""
        self.poison()
        poisoned = self.checksums()
        for stub in self._ranks.values():
            stub.LoadFolder(pb.LoadFolderRequest(path=str(folder)), timeout=CALL_S)
        truth = self.checksums()
        left_out = [(slot, name) for slot in truth for name in truth[slot] if poisoned[slot][name] == truth[slot][name]]
        assert left_out == []
        return truth


class Trainer(Fleet):
    """The only rank of a trainer, for one replica, whose ranks reach it at `host`."""

    def __init__(self, replica: Replica, host: str = "127.0.0.1") -> None:
        self._name = replica.name
        super().__init__(
            replica.redis_url,
            ModelSpec.from_folder(replica.model),
            Parallel(),
            {replica.name: replica.layout},
            group=f"tandem:{replica.run_id}",
            services={replica.name: replica.phase},
            host=host,
        )

    def round(self, version: int, **changes: Any) -> pb.Round:
        """Make a round as the fleet does, with longer deadlines and larger messages."""
        fields = {"bucket_bytes": 1 << 20, "formation_timeout_s": 20.0, "transfer_timeout_s": 20.0}
        return super().round(version, round_id=uuid.uuid4().hex, **fields | changes)

    def both(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> pb.RunPhaseResponse:
        """Run a phase on the trainer and on the replica concurrently. Returns: the replica's reply."""
        reply: pb.RunPhaseResponse = run_phase(self.participants, phase, round_)[self._name]
        return reply

    def publish(self, version: int, **fields: Any) -> dict[int, pb.RunPhaseResponse]:
        """Run a whole round. Returns: the replica's replies, by phase."""
        replies = run_round(self.participants, self.round(version, **fields))
        return {phase: of_phase[self._name] for phase, of_phase in replies.items()}
