"""The ranks of a trainer as real processes, the steps that tests ask of them, and who takes their weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from servicekit.redis.records import ServiceRecord
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import RunConfig
from tests.kit.fleet import Fleet
from tests.kit.folders import WORDS, write_tokenizer
from tests.kit.models import TRAINED_VOCABULARY
from tests.kit.processes import Services
from tests.kit.round import service_at
from tests.kit.stores import Tensors
from tests.unit.trainer.batches import sample_chunk
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import load_shards

RUN_ID = "trainer-test"


class TrainerProcesses(Services):
    """The ranks of one trainer; `folder` is the run's.

    Args:
        profile: section `profile` of the configuration; None: its defaults.
        trainer: of section `trainer`.
    """

    def __init__(
        self, redis_url: str, folder: Path, model: Path, profile: Mapping[str, Any] | None = None, /, **trainer: Any
    ) -> None:
        (folder / "tokenizer").mkdir(exist_ok=True)
        write_tokenizer(folder / "tokenizer", WORDS)
        # Another name of where they listen, so that a test sees which of the two is announced.
        super().__init__(redis_url, folder, RUN_ID, {"TANDEM_ADVERTISE_HOST": "localhost"})
        settings = {
            "model": {"path": str(model), "tokenizer_path": str(folder / "tokenizer")},
            "data": {"train": str(folder / "train.jsonl")},
            "grpo": {"prompts_per_iteration": 8, "group_size": 2},
            # The first steps differ in size, so that a test sees which step one is.
            "trainer": {"learning_rate": 1e-3, "warmup_iterations": 50, **trainer},
            "profile": {} if profile is None else dict(profile),
        }
        self.config = RunConfig.model_validate(settings)
        self.ranks = [f"trainer-{rank}" for rank in range(self.config.trainer.world_size)]

    @property
    def run_dir(self) -> Path:
        return self.folder

    def begin(self, *arguments: str, module: str = "trainer_service") -> "TrainerProcesses":
        """Starts every rank; returns at once."""
        self.start_trainer(self.config, *arguments, module=module)
        return self

    def ready(self) -> ServiceRecord:
        """Waits for the announcement."""
        return self.record_of("trainer", "trainer")

    def receive(
        self, layout: Parallel, transport: weights_pb2.SyncTransport.ValueType = weights_pb2.SYNC_TRANSPORT_AUTO
    ) -> tuple[Tensors, Sequence[weights_pb2.PhaseReport]]:
        """A whole round to a rollout rank without an engine.

        Returns: what arrived, and the trainer ranks' reports of TRANSFER.
        """
        spec, group = ModelSpec.from_folder(self.config.model.path), f"tandem:{RUN_ID}"
        with grpc.insecure_channel(self.ready().address) as channel:
            status = trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
            replicas, services = {"rollout-0": Parallel()}, {"trainer": service_at(channel)}
            with Fleet(self.redis_url, spec, layout, replicas, group=group, services=services) as fleet:
                times = {"formation_timeout_s": 20.0, "transfer_timeout_s": 20.0}
                round_ = fleet.round(status.policy_version, wait_s=10.0, transport=transport, **times)
                reports = fleet.sync(round_)["trainer"].reports
                return fleet.stores["rollout-0/0"], reports

    async def exported(self, stub: Any, folder: Path) -> Tensors:
        """What must have arrived: the same parameters, read from the folder that the trainer exports."""
        await stub.ExportModel(pb.ExportModelRequest(path=str(folder)), timeout=60)
        spec = ModelSpec.from_folder(self.config.model.path)
        layout = sglang_layout(spec, Parallel())
        # Not NaN, as what receives is at first: what neither has written would be equal.
        tensors = {name: torch.zeros(shape) for name, shape in layout.parameters_of(0).items()}
        load_shards(folder, spec, layout, 0, tensors)
        return tensors


def chunk(update: int = 0, num_samples: int = 4, seed: int = 0, **changes: Any) -> pb.SampleChunk:
    """Random samples of the tiny model's vocabulary."""
    random = np.random.default_rng(seed + update)
    prompts, completions = random.integers(1, 6, num_samples), random.integers(1, 6, num_samples)
    fields: dict[str, Any] = {
        "update_index": update,
        "sample_ids": [f"u{update}-s{i}" for i in range(num_samples)],
        "prompt_lengths": prompts,
        "completion_lengths": completions,
        "token_ids": random.integers(0, TRAINED_VOCABULARY, int((prompts + completions).sum())),
        "rollout_logprobs": random.normal(-4, 1, int(completions.sum())),
        "advantages": random.normal(size=num_samples),
        "trainable": [True] * num_samples,
    }
    return sample_chunk({**fields, **changes})


def one_by_one(whole: pb.SampleChunk) -> list[pb.SampleChunk]:
    """The same samples, a chunk each."""
    chunks, first, completed = [], 0, 0
    for i, (prompt, completion) in enumerate(zip(whole.prompt_lengths, whole.completion_lengths, strict=True)):
        chunks.append(
            pb.SampleChunk(
                update_index=whole.update_index,
                sample_ids=[whole.sample_ids[i]],
                prompt_lengths=[prompt],
                completion_lengths=[completion],
                token_ids_u32=whole.token_ids_u32[4 * first : 4 * (first + prompt + completion)],
                rollout_logprobs_f32=whole.rollout_logprobs_f32[4 * completed : 4 * (completed + completion)],
                advantages=[whole.advantages[i]],
                trainable=[whole.trainable[i]],
            )
        )
        first, completed = first + prompt + completion, completed + completion
    return chunks


def step_requests(step_id: str, version: int, chunks: Sequence[pb.SampleChunk]) -> list[pb.TrainStepRequest]:
    """The stream of a TrainStep call."""
    header = pb.TrainStepHeader(
        step_id=step_id,
        policy_version=version,
        num_updates=len({each.update_index for each in chunks}),
        num_samples=sum(len(each.sample_ids) for each in chunks),
    )
    return [pb.TrainStepRequest(header=header), *(pb.TrainStepRequest(chunk=each) for each in chunks)]
