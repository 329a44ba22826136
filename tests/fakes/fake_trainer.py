"""A trainer service without an engine: a real gRPC server that checks every batch and counts versions."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from servicekit.errors import Internal, InvalidRequest, NotReady, TandemError, Unavailable, WrongVersion
from servicekit.rpc.arrays import array_length, packed
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1 import common_pb2
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tests.fakes.fake_sync import FakeSync
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import TRAINER_ENGINE
from weightsync.round.phases import Role


@dataclass
class Step:
    """A train step as it arrived."""

    header: pb.TrainStepHeader
    chunks: list[pb.SampleChunk]


@dataclass
class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """The trainer.

    Attributes:
        logprob_diff: what it reports as logprob_abs_diff_max.
        own_logprob: of each token under its policy, when it is asked for them.
        reference_logprob: the same under the reference policy; None: there is none.
        measured: of each message of ComputeLogprobs, the number of its samples, and whether it is of the reference.
        saving, hold: set by SaveCheckpoint, which waits while the other is cleared; in the background it is
            FinishCheckpoint that waits.
        save_faults: one per SaveCheckpoint call, None for a good one.
        faults: one per TrainStep call, None for a good one; `lost_reply` ones fail after the step was done.
        export_faults: the same of ExportModel.
        leaves: it was asked to end; its status says so while a step is unsaved.
        on_gpus: it says that it computes on GPUs.
    """

    policy_version: int = 0
    settings_digest: str = ""
    tensor_parallel: int = 2
    logprob_diff: float = 1e-6
    compute_s: float = 0.002
    own_logprob: float = -0.125  # as the fake replicas report
    reference_logprob: float | None = None
    measured: list[tuple[int, bool]] = field(default_factory=list)
    faults: deque[TandemError | None] = field(default_factory=deque)
    export_faults: deque[TandemError | None] = field(default_factory=deque)
    save_faults: deque[TandemError | None] = field(default_factory=deque)
    lost_replies: int = 0
    leaves: bool = False
    on_gpus: bool = False
    # Called by each train step before it is done.
    before_step: Callable[[int], Awaitable[None]] | None = None
    steps: list[Step] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)
    exported: list[Path] = field(default_factory=list)
    restored: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sync = FakeSync(role=Role.SENDER, num_ranks=self.tensor_parallel)
        self._replies: dict[str, pb.TrainStepResponse] = {}
        self.step_id = ""
        self.fence = FenceGuard()
        self.saving, self.hold = asyncio.Event(), asyncio.Event()
        self.hold.set()
        self.saved_version = self.policy_version
        self._background: tuple[Path, int, TandemError | None] | None = None

    def restart(self, policy_version: int) -> None:
        """Lose everything but a checkpoint's policy, as a process that has started again."""
        self.policy_version = self.saved_version = policy_version
        self.step_id, self._replies, self._background = "", {}, None

    async def TakeOver(self, request: pb.TakeOverRequest, context: Any) -> pb.TakeOverResponse:
        self.fence.admit(request.fence)
        return pb.TakeOverResponse(policy_version=self.policy_version)

    async def TrainStep(
        self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Any
    ) -> pb.TrainStepResponse:
        requests = [request async for request in request_iterator]
        self.fence.admit(requests[0].header.fence)
        step = Step(requests[0].header, [request.chunk for request in requests[1:]])
        if step.header.step_id in self._replies:
            return self._replies[step.header.step_id]
        fault = self.faults.popleft() if self.faults else None
        if fault is not None:
            raise fault
        check_step(step)
        if step.header.policy_version != self.policy_version:
            raise WrongVersion(
                f"step starts from {step.header.policy_version}, the trainer is at {self.policy_version}"
            )
        if self.before_step is not None:
            await self.before_step(len(self.steps) + 1)
        self.steps.append(step)
        self.policy_version += 1
        self.step_id = step.header.step_id
        self._replies[step.header.step_id] = self._reply()
        if self.lost_replies:
            self.lost_replies -= 1
            raise Unavailable("the reply was lost")
        return self._replies[step.header.step_id]

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Any
    ) -> AsyncIterator[pb.ComputeLogprobsResponse]:
        async for request in request_iterator:
            value = self.reference_logprob if request.reference else self.own_logprob
            if value is None:
                raise InvalidRequest("there is no reference policy")
            if request.chunk.continues[:1] == [True]:
                raise InvalidRequest("the first sample of a message continues an episode")
            ids = request.chunk.sample_ids
            if len(set(ids)) < len(ids):
                raise InvalidRequest(f"{len(ids)} samples, {len(set(ids))} of them distinct")
            if not all(policy_samples(request.chunk)):
                raise InvalidRequest("loss_mask masks all of a sample's tokens")
            self.measured.append((len(ids), request.reference))
            yield pb.ComputeLogprobsResponse(
                logprobs_f32=packed("logprobs_f32", [value] * sum(request.chunk.completion_lengths))
            )

    async def RunPhase(self, request: weights_pb2.RunPhaseRequest, context: Any) -> weights_pb2.RunPhaseResponse:
        self.fence.admit(request.round.fence)
        return weights_pb2.RunPhaseResponse(reports=self.sync.run_phase(request.phase, request.round))

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        self.fence.admit(request.fence)
        fault = self.save_faults.popleft() if self.save_faults else None
        beside = request.background or (request.background_on_gpus and self.on_gpus)
        self._background = (Path(request.path), self.policy_version, fault) if beside else None
        if not beside:
            await self._save(Path(request.path), self.policy_version, fault)
        return pb.SaveCheckpointResponse(policy_version=self.policy_version, bytes=1, writing=beside)

    async def FinishCheckpoint(self, request: pb.FinishCheckpointRequest, context: Any) -> pb.FinishCheckpointResponse:
        self.fence.admit(request.fence)
        if self._background is None or self._background[0] != Path(request.path):  # as the real one says it
            raise NotReady(f"checkpoint {request.path} is not being written by this trainer")
        await self._save(*self._background)
        return pb.FinishCheckpointResponse(bytes=1)

    async def _save(self, folder: Path, policy_version: int, fault: TandemError | None) -> None:
        self.saving.set()
        await self.hold.wait()
        if fault is not None:
            raise fault
        try:
            folder.mkdir()
            (folder / "version").write_text(str(policy_version))
        except OSError as error:  # as the real one says it
            raise Internal(f"cannot write checkpoint {folder}: {error}") from error
        self.saved.append(folder)
        self.saved_version = policy_version

    async def RestorePolicy(self, request: pb.RestorePolicyRequest, context: Any) -> pb.RestorePolicyResponse:
        self.fence.admit(request.fence)
        if request.path and not Path(request.path, "version").is_file():
            raise InvalidRequest(f"{request.path} is no checkpoint")
        if request.policy_version < self.policy_version:  # as the real one says it
            raise InvalidRequest(
                f"version {request.policy_version} is less than the trainer's own, {self.policy_version}"
            )
        self.restored.append((request.path, request.policy_version))
        self.step_id = ""
        self.policy_version = self.saved_version = request.policy_version
        return pb.RestorePolicyResponse(policy_version=self.policy_version)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> pb.ExportModelResponse:
        self.fence.admit(request.fence)
        fault = self.export_faults.popleft() if self.export_faults else None
        if fault is not None:
            raise fault
        Path(request.path).mkdir(parents=True, exist_ok=True)
        self.exported.append(Path(request.path))
        return pb.ExportModelResponse(policy_version=self.policy_version, bytes=1)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            policy_version=self.policy_version,
            parallel=Parallel(engine=TRAINER_ENGINE, tensor=self.tensor_parallel).to_proto(),
            world_size=self.tensor_parallel,
            versions=common_pb2.SoftwareVersions(packages={"megatron_core": "0.0", "torch": "0.0"}),
            settings_digest=self.settings_digest,
            leaving=self.leaves and self.policy_version != self.saved_version,
            step_id=self.step_id,
        )

    def _reply(self) -> pb.TrainStepResponse:
        metrics = {"loss": 0.5, "grad_norm": 1.0, "entropy": 0.25, "logprob_abs_diff_max": self.logprob_diff}
        metrics |= {"logprob_abs_diff_p999": self.logprob_diff}
        metrics |= {"logprob_abs_diff_mean": self.logprob_diff / 2, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0}
        metrics["kl_old"] = 1e-3
        seconds = dict.fromkeys(("old_logprobs", "forward_backward"), self.compute_s / 2)
        return pb.TrainStepResponse(policy_version=self.policy_version, metrics=metrics, seconds=seconds)


def policy_samples(chunk: pb.SampleChunk) -> list[bool]:
    """Whether each sample of a message has a token that is the policy's."""
    ends = list(accumulate(chunk.completion_lengths, initial=0))
    mask = chunk.loss_mask_u8
    return [not mask or 1 in mask[first:last] for first, last in pairwise(ends)]


def check_step(step: Step) -> None:
    """Raises: InvalidRequest: the batch contradicts the protos."""
    updates = [batch.update_index for batch in step.chunks]
    if updates != sorted(updates) or set(updates) != set(range(step.header.num_updates)):
        raise InvalidRequest(f"updates come as {updates}, {step.header.num_updates} were announced")
    ids = [sample_id for batch in step.chunks for sample_id in batch.sample_ids]
    if len(set(ids)) != len(ids) or len(ids) != step.header.num_samples:
        raise InvalidRequest(f"{len(ids)} samples ({len(set(ids))} distinct), {step.header.num_samples} were announced")
    for batch in step.chunks:
        sizes = {len(batch.sample_ids), len(batch.prompt_lengths), len(batch.completion_lengths)}
        sizes |= {len(batch.advantages), len(batch.trainable)}
        completion = sum(batch.completion_lengths)
        if len(sizes) != 1 or array_length(batch, "token_ids_u32") != sum(batch.prompt_lengths) + completion:
            raise InvalidRequest("a chunk's fields have different lengths")
        if array_length(batch, "rollout_logprobs_f32") != completion:
            raise InvalidRequest("a chunk's log-probs do not fit its completions")
        if array_length(batch, "loss_mask_u8") not in (0, completion):
            raise InvalidRequest("a chunk's loss mask does not fit its completions")
