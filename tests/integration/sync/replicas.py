"""Real SGLang replicas of one model, and what a test of exactness asks of them."""

from pathlib import Path
from typing import Any

import grpc

from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem_config.schema import RunConfig
from tests.kit.waiting import until
from tests.service_processes import START_S, Services
from weightsync.layouts.layout import Parallel

CALL_S = 60.0
Checksums = dict[str, dict[str, str]]  # by slot, by parameter


def configuration(model: Path, run_id: str, dtype: str = "float32", **sections: dict[str, Any]) -> RunConfig:
    """A run's configuration around a model folder."""
    fixed: dict[str, Any] = {
        "run": {"name": run_id},
        "model": {"path": model, "dtype": dtype},
        "data": {"train": model / "unused.jsonl"},
        "sync": {"bucket_mib": 0.01},
    }
    return RunConfig.model_validate(fixed | sections)


class Replicas:
    """Replica processes by name.

    layouts: their parallel sizes; dtype: what they hold; module: what runs them.
    """

    def __init__(
        self,
        services: Services,
        model: Path,
        layouts: dict[str, Parallel],
        dtype: str = "float32",
        module: str = "rollout_service",
    ) -> None:
        self._services = services
        self.model = model
        self.redis_url = services.redis_url
        self.group = f"tandem:{services.run_id}"
        self.layouts = layouts
        for name, layout in layouts.items():
            rollout = {
                "tensor_parallel": layout.tensor,
                "expert_parallel": layout.expert,
                "max_total_tokens": 1024,
            }
            services.start_rollout(name, configuration(model, services.run_id, dtype, rollout=rollout), module)

    def wait_up(self) -> None:
        """Returns once all are announced. Raises: RuntimeError, with the log's end: a process has ended instead."""
        until(self._up_or_ended, START_S)
        self.addresses = {name: self._services.address_of("rollout", name) for name in self.layouts}
        self._ranks = {
            f"{name}/{rank}": weights_pb2_grpc.ShardReceiverServiceStub(grpc.insecure_channel(address))
            for name in self.layouts
            for rank, address in enumerate(self._services.sockets_of(name))
        }
        assert len(self._ranks) == sum(layout.tensor for layout in self.layouts.values())

    def _up_or_ended(self) -> bool:
        for name in self.layouts:
            if self._services.processes[name].poll() is not None:
                raise RuntimeError(self._services.tail(name))
        return {record.name for record in self._services.registry.list("rollout")} >= set(self.layouts)

    def checksums(self) -> Checksums:
        return {
            slot: dict(stub.GetChecksums(weights_pb2.GetChecksumsRequest(), timeout=CALL_S).checksums)
            for slot, stub in self._ranks.items()
        }

    def poison(self) -> None:
        for stub in self._ranks.values():
            assert stub.PoisonWeights(weights_pb2.PoisonWeightsRequest(), timeout=CALL_S).num_tensors > 10

    def truth(self, folder: Path) -> Checksums:
        """What SGLang's own loader makes of a Hugging Face folder."""
        self.poison()
        poisoned = self.checksums()
        for stub in self._ranks.values():
            stub.LoadFolder(weights_pb2.LoadFolderRequest(path=str(folder)), timeout=CALL_S)
        truth = self.checksums()
        left_out = [(slot, name) for slot in truth for name in truth[slot] if poisoned[slot][name] == truth[slot][name]]
        assert left_out == []
        return truth

    def greedy(self, replica: str, prompts: list[list[int]], version: int, num_tokens: int) -> list[Any]:
        """One greedy completion per prompt, in order."""
        request = rollout_pb2.GenerateGroupsRequest(
            groups=[
                rollout_pb2.PromptGroup(group_id=str(i), prompt_ids=ids, num_completions=1)
                for i, ids in enumerate(prompts)
            ],
            sampling=rollout_pb2.SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=num_tokens),
            policy_version=version,
        )
        with grpc.insecure_channel(self.addresses[replica]) as channel:
            replies = list(rollout_pb2_grpc.RolloutServiceStub(channel).GenerateGroups(request, timeout=CALL_S))
        by_id = {group.group_id: group.completions[0] for reply in replies for group in reply.groups}
        return [by_id[str(i)] for i in range(len(prompts))]
