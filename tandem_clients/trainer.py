"""Step 7: client of the trainer service. Its errors name the trainer, its calls always have a deadline.

It turns samples into messages; their size changes the number of messages, not the step.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from servicekit.errors import Unavailable, rpc_errors
from servicekit.logs import get_logger
from servicekit.rpc.arrays import read_array
from servicekit.rpc.channel import DeadlineChannel, ServiceClient, open_channel
from servicekit.rpc.limits import SAMPLE_CHUNK_BYTES, chunk_starts
from servicekit.security.tls import Identity
from tandem_api.common.v1 import common_pb2
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_clients.flow import Sample, TrainBatch, TrainResult, policy_tokens
from weightsync.round.client import of_participant

# Longest deadlines by the service's contract (protos/tandem_api/trainer/v1/trainer.proto).
STEP_TIMEOUT_S = 3600.0
SAVE_TIMEOUT_S = 1800.0
STATUS_TIMEOUT_S = 10.0
# Seconds for which a trainer may say that it has as much to do as it takes.
BUSY_S = 600.0
# Bytes on the wire: of a token id; of a log-prob, and of the token's place in the mask; at most for the rest of a
# sample: its lengths, advantage, flag (21 with the prefix of its name), and the fields that a message has once (53).
_ID_BYTES, _SAMPLED_BYTES, _OVERHEAD_BYTES = 4, 4 + 1, 96

T = TypeVar("T")
log = get_logger(__name__)


class Learner(Protocol):
    """What an iteration needs of the trainer."""

    async def train_step(self, batch: TrainBatch, sent: asyncio.Event) -> TrainResult:
        """Run one GRPO step; `sent` is set when the batch is with the trainer."""

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> NDArray[np.float32]:
        """Compute the log-probs of all completion tokens, sample after sample: [T]."""


class Trainer(ServiceClient):
    """The trainer service; see ServiceClient for what its methods raise.

    Args:
        fence: of the calling coordinator; None: the caller does not lead a run.
    Attributes:
        rounds: runs the phases of a weight sync on it.
        address: where it is called.
        announced: where a trainer is announced; "": none is, and this client stays where the last one was.
    """

    name = "trainer"

    def __init__(
        self, address: str, identity: Identity | None = None, fence: common_pb2.CoordinatorFence | None = None
    ) -> None:
        self.address = self.announced = address
        self._fence = common_pb2.CoordinatorFence() if fence is None else fence
        self._identity = identity
        self._channel = self._open()
        self._connect()

    async def move_to(self, address: str) -> None:
        """Use `address` from now on: a restarted trainer listens at another one."""
        if address == self.address:
            return
        log.warning("trainer address changed", old=self.address, new=address)
        self.address = address
        old, self._channel = self._channel, self._open()
        self._connect()
        await old.close()

    def _connect(self) -> None:
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        self.rounds = of_participant(self.name, self._channel)

    def _open(self) -> DeadlineChannel:
        return open_channel(self.address, identity=self._identity, peer=self.name)

    async def take_over(self) -> None:
        """Make it refuse older coordinators; return when the work that they started is done."""
        await self._call(self._stub.TakeOver, trainer_pb2.TakeOverRequest(fence=self._fence), STEP_TIMEOUT_S)

    async def train_step(self, batch: TrainBatch, sent: asyncio.Event | None = None) -> TrainResult:
        """Run one GRPO step.

        After a lost reply the step may or may not have been done: it is sent once more under the same step_id, and if
        it was done, the trainer repeats its first reply.

        Args:
            sent: set when the batch is with the trainer.
        """
        return await self.redo_step(partial(step_requests, batch), batch.step_id, sent)

    async def redo_step(
        self,
        requests: Callable[[], Iterator[trainer_pb2.TrainStepRequest]],
        step_id: str,
        sent: asyncio.Event | None = None,
    ) -> TrainResult:
        """Run a step of these messages, as train_step does.

        Args:
            requests: makes them; each fence is replaced by ours.
        """
        sent = asyncio.Event() if sent is None else sent
        return await _repeated(lambda: self._train_step(requests, step_id, sent), step_id=step_id)

    async def _train_step(
        self, requests: Callable[[], Iterator[trainer_pb2.TrainStepRequest]], step_id: str, sent: asyncio.Event
    ) -> TrainResult:
        with rpc_errors(self.name):
            response = await self._stub.TrainStep(self._fenced(requests(), sent), timeout=STEP_TIMEOUT_S)
        return TrainResult(
            step_id=step_id,
            policy_version=response.policy_version,
            metrics=dict(response.metrics),
            seconds=dict(response.seconds),
        )

    def _fenced(
        self, requests: Iterator[trainer_pb2.TrainStepRequest], sent: asyncio.Event
    ) -> Iterator[trainer_pb2.TrainStepRequest]:
        for request in requests:
            if request.HasField("header"):
                request.header.fence.CopyFrom(self._fence)
            yield request
        sent.set()

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> NDArray[np.float32]:
        """Compute the log-probs of all completion tokens, sample after sample: [T], at the sampling temperature.

        Args:
            reference: under the reference policy; else under the present one.

        Returns: 0 where no sequence that is trained has the token: before one, in a branch of its own.
        """
        found_T = await _repeated(lambda: self._logprobs(samples, reference), reference=reference)
        out_T = np.zeros(sum(len(sample.completion.token_ids) for sample in samples), np.float32)
        offset = at = 0
        for sample in samples:
            for begin, part in sequences_of(sample):
                num = len(part.completion.token_ids)
                out_T[offset + begin : offset + begin + num] = found_T[at : at + num]
                at += num
            offset += len(sample.completion.token_ids)
        return out_T

    async def _logprobs(self, samples: Sequence[Sample], reference: bool) -> NDArray[np.float32]:
        chunks = sample_chunks(samples, says_episodes=False)  # each message is judged by itself
        requests = (trainer_pb2.ComputeLogprobsRequest(chunk=chunk, reference=reference) for chunk in chunks)
        with rpc_errors(self.name):
            call = self._stub.ComputeLogprobs(requests, timeout=STEP_TIMEOUT_S)
            return np.concatenate([np.array(read_array(reply, "logprobs_f32")) async for reply in call])

    async def save_checkpoint(self, folder: Path, *, background: bool | None = False) -> bool:
        """Write weights, optimizer and RNG state into a folder.

        Args:
            background: return when a copy is taken; None: if the trainer computes on GPUs.
        Returns: whether the copy is still being written: finish_checkpoint waits for that.
        """
        request = trainer_pb2.SaveCheckpointRequest(
            path=str(folder), fence=self._fence, background=background is True, background_on_gpus=background is None
        )
        response = await self._call(self._stub.SaveCheckpoint, request, SAVE_TIMEOUT_S)
        return bool(response.writing)

    async def finish_checkpoint(self, folder: Path) -> None:
        """Wait until what save_checkpoint began is written. Raises: Internal: it was not written."""
        request = trainer_pb2.FinishCheckpointRequest(path=str(folder), fence=self._fence)
        await self._call(self._stub.FinishCheckpoint, request, SAVE_TIMEOUT_S)

    async def restore(self, folder: Path | None, policy_version: int) -> None:
        """Go back to the state in `folder`.

        Args:
            folder: the trainer's folder of a checkpoint; None: the initial model.
            policy_version: the restored policy's version from now on; no replica may have had it.
        """
        path = "" if folder is None else str(folder)
        request = trainer_pb2.RestorePolicyRequest(path=path, policy_version=policy_version, fence=self._fence)
        await self._call(self._stub.RestorePolicy, request, SAVE_TIMEOUT_S)

    async def export_model(self, folder: Path) -> int:
        """Write the policy as a Hugging Face folder. Returns: the version written."""
        request = trainer_pb2.ExportModelRequest(path=str(folder), fence=self._fence)
        response = await self._call(self._stub.ExportModel, request, SAVE_TIMEOUT_S)
        return int(response.policy_version)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> trainer_pb2.GetStatusResponse:
        """Ask for its version, parallel sizes, activity and software versions."""
        request = trainer_pb2.GetStatusRequest()
        status: trainer_pb2.GetStatusResponse = await self._call(self._stub.GetStatus, request, timeout_s)
        return status


async def _repeated(attempt: Callable[[], Awaitable[T]], **about: Any) -> T:
    """Make a call, once more if its reply is lost; a trainer that is busy is asked again for BUSY_S at most."""
    busy_until_s, num_lost = time.monotonic() + BUSY_S, 0
    while True:
        try:
            return await attempt()
        except Unavailable as error:
            num_lost += not error.after_s
            if num_lost > 1 or (error.after_s and time.monotonic() > busy_until_s):
                raise
            log.warning("call is made again", after_s=error.after_s, error=str(error), **about)
            await asyncio.sleep(error.after_s)


def sequences_of(sample: Sample) -> list[tuple[int, Sample]]:
    """Divide a sample at its branches; those without a token to train on are left out.

    Returns: sequences, each with the place of its completion's first token. The prompt of a branch is what precedes its
    first token to train on.
    """
    whole = sample.completion
    if not whole.branches or whole.loss_mask is None:
        return [(0, sample)]
    found = []
    for number, (begin, end) in enumerate(pairwise([0, *whole.branches, len(whole.token_ids)])):
        first = whole.loss_mask.tobytes().find(1, begin, end)
        if first < 0:
            continue
        start = first if number else begin
        part = replace(
            whole,
            token_ids=whole.token_ids[start:end],
            logprobs=whole.logprobs[start:end],
            loss_mask=whole.loss_mask[start:end],
            branches=(),
        )
        prompt = replace(sample.prompt, token_ids=whole.token_ids[begin:start]) if number else sample.prompt
        name = f"{sample.sample_id}.{number}" if number else sample.sample_id
        found.append((start, replace(sample, sample_id=name, prompt=prompt, completion=part)))
    return found


def step_requests(batch: TrainBatch, chunk_bytes: int = SAMPLE_CHUNK_BYTES) -> Iterator[trainer_pb2.TrainStepRequest]:
    """Yield the messages of a step: a header, then the samples in ascending order of their update."""
    yield trainer_pb2.TrainStepRequest(
        header=trainer_pb2.TrainStepHeader(
            step_id=batch.step_id,
            policy_version=batch.policy_version,
            num_updates=len(batch.updates),
            num_samples=sum(len(_divided(samples)) for samples in batch.updates),
        )
    )
    for update_index, samples in enumerate(batch.updates):
        for chunk in sample_chunks(samples, update_index, chunk_bytes):
            yield trainer_pb2.TrainStepRequest(chunk=chunk)


def sample_chunks(
    samples: Sequence[Sample],
    update_index: int = 0,
    chunk_bytes: int = SAMPLE_CHUNK_BYTES,
    *,
    says_episodes: bool = True,
) -> Iterator[trainer_pb2.SampleChunk]:
    """Yield samples, divided at their branches, in messages of at most chunk_bytes, but of at least one sequence.

    Args:
        says_episodes: whether sequences say which of them are of one episode, wherever the messages are cut.
    """
    parts = _divided(samples)
    starts = chunk_starts([_wire_bytes(part) for _, part in parts], chunk_bytes)
    for start, end in pairwise([0, *starts, len(parts)]):
        continues = [continued for continued, _ in parts[start:end]] if says_episodes else ()
        yield _chunk(update_index, [part for _, part in parts[start:end]], continues)


def _divided(samples: Sequence[Sample]) -> list[tuple[bool, Sample]]:
    """Divide samples at their branches. Returns: sequences, each with whether it continues the one before."""
    if not [sample for sample in samples if sample.completion.branches]:
        return [(False, sample) for sample in samples]
    return [(number > 0, part) for sample in samples for number, (_, part) in enumerate(sequences_of(sample))]


def _wire_bytes(sample: Sample) -> int:
    """Return the bytes that a sample adds to a message at most."""
    completion = len(sample.completion.token_ids)
    ids = _ID_BYTES * (len(sample.prompt.token_ids) + completion)
    return ids + _SAMPLED_BYTES * completion + len(sample.sample_id.encode()) + _OVERHEAD_BYTES


def _chunk(update_index: int, samples: Sequence[Sample], continues: Sequence[bool]) -> trainer_pb2.SampleChunk:
    """Build the wire form of samples of one update; ragged fields are flattened in sample order."""
    token_ids = [ids.tobytes() for sample in samples for ids in (sample.prompt.token_ids, sample.completion.token_ids)]
    masked = any(sample.completion.loss_mask is not None for sample in samples)
    return trainer_pb2.SampleChunk(
        update_index=update_index,
        sample_ids=[sample.sample_id for sample in samples],
        prompt_lengths=[len(sample.prompt.token_ids) for sample in samples],
        completion_lengths=[len(sample.completion.token_ids) for sample in samples],
        advantages=[sample.advantage for sample in samples],
        trainable=[sample.trainable for sample in samples],
        token_ids_u32=b"".join(token_ids),
        rollout_logprobs_f32=b"".join([sample.completion.logprobs.tobytes() for sample in samples]),
        loss_mask_u8=policy_tokens(samples).tobytes() if masked else b"",
        continues=continues if any(continues) else (),
    )
