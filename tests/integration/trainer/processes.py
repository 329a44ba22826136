"""Starts the trainer's ranks as real processes and talks to rank 0."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tests.integration.trainer.tiny_inputs import VOCAB

REPOSITORY = Path(__file__).parents[3]
READY_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 60.0
RUN_ID = "trainer-test"


class TrainerProcesses:
    """The ranks of one trainer; run folder, logs and configuration lie in `folder`."""

    def __init__(self, redis_url: str, folder: Path, model: Path, **trainer: Any) -> None:
        self._redis_url = redis_url
        self.folder = folder
        settings = {
            "model": {"path": str(model)},
            "data": {"train": str(folder / "train.jsonl")},
            "grpo": {"prompts_per_iteration": 8, "group_size": 2},
            # The first steps differ in size, so that a test sees which step one is.
            "trainer": {"learning_rate": 1e-3, "warmup_iterations": 50, **trainer},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, world_size: int, *arguments: str) -> "TrainerProcesses":
        """Returns at once."""
        environment = os.environ | {
            "REDIS_URL": self._redis_url,
            "TANDEM_RUN_ID": RUN_ID,
            "TANDEM_RUN_DIR": str(self.folder),
            # Another name of where they listen, so that a test sees which of the two is announced.
            "TANDEM_ADVERTISE_HOST": "localhost",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world_size),
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "trainer_service",
            "--config",
            str(self.folder / "config.yaml"),
        ]
        for rank in range(world_size):
            with self.log(rank).open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*command, *arguments],
                        cwd=REPOSITORY,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        return self

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def ready(self) -> ServiceRecord:
        """Waits for the announcement."""
        registry = Registry(self._redis_url, RUN_ID)
        try:
            return registry.wait_for("trainer", ["trainer"], READY_TIMEOUT_S)[0]
        finally:
            registry.close()

    def signal(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def exit_codes(self) -> list[int]:
        """Waits for all ranks."""
        return [process.wait(timeout=EXIT_TIMEOUT_S) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(timeout=10)


def chunk(update: int = 0, num_samples: int = 4, seed: int = 0, **changes: Any) -> pb.SampleChunk:
    """Random samples of the tiny model's vocabulary."""
    random = np.random.default_rng(seed + update)
    prompts, completions = random.integers(1, 6, num_samples), random.integers(1, 6, num_samples)
    fields: dict[str, Any] = {
        "update_index": update,
        "sample_ids": [f"u{update}-s{i}" for i in range(num_samples)],
        "prompt_lengths": prompts,
        "completion_lengths": completions,
        "token_ids": random.integers(0, VOCAB, int((prompts + completions).sum())),
        "rollout_logprobs": random.normal(-4, 1, int(completions.sum())),
        "advantages": random.normal(size=num_samples),
        "trainable": [True] * num_samples,
    }
    return pb.SampleChunk(**{**fields, **changes})


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
                token_ids=whole.token_ids[first : first + prompt + completion],
                rollout_logprobs=whole.rollout_logprobs[completed : completed + completion],
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
