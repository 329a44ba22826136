"""TrainerService of rank 0: checks requests, then commands all ranks.

A wrong request is refused before any collective, so the trainer keeps serving.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from servicekit.errors import InvalidRequest, NotFinite, NotReady, Overloaded, TandemError
from servicekit.logs import get_logger
from servicekit.rpc.fence import FenceGuard
from servicekit.versions import software_versions
from tandem_api.common.v1 import common_pb2
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem_files.exports import EXPORT
from tandem_files.run_paths import inside, replaceable
from trainer_service import metrics
from trainer_service.checkpoints.files import CHECKPOINT
from trainer_service.engine import Saving, TrainerEngine
from trainer_service.micro_batches.checks import check_updates
from trainer_service.micro_batches.merge import merge
from trainer_service.micro_batches.receive import ReceivedStep, receive_chunks, receive_header
from trainer_service.ranks.commands import Command, Commander
from trainer_service.ranks.handlers import check_version
from weightsync.round import deadlines
from weightsync.round.client import only_phase
from weightsync.round.phases import ABORT, COMMIT, PREPARE, RULES, name_of

# While it leaves, a coordinator that has not asked for the status for so long saves nothing; it asks every second.
SILENT_S = 5.0
# Between two looks at whether everything is saved.
_LOOK_S = 0.1
# A client repeats a step right after its reply was lost, so few replies need to be kept.
KEPT_REPLIES = 4
# Most train steps, received or trained: one is right; another may be of a coordinator that was replaced, or whose
# reply was lost.
MAX_BATCHES = 4
PACKAGES = ("torch", "megatron_core", "numpy", "grpcio", "protobuf", "safetensors")

log = get_logger(__name__)


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """Serves the trainer's RPCs; refuses each with NOT_READY until `serve_engine` is called.

    Args:
        max_samples: most samples of one train step.
        run_dir: the folder that requests may write to.
        settings_digest: of the settings on which the run's services must agree.
        interrupt: ends the waits of ranks in a phase of the round with this id; blocking.
    """

    def __init__(
        self,
        commander: Commander,
        *,
        max_samples: int,
        run_dir: Path,
        settings_digest: str = "",
        interrupt: Callable[[str], None] = lambda round_id: None,
    ) -> None:
        self._commander = commander
        self._run_dir = run_dir
        self._settings_digest = settings_digest
        self._interrupt = interrupt
        self._max_samples = max_samples
        self._engine: TrainerEngine | None = None
        self._fence = FenceGuard()
        self._steps: OrderedDict[str, asyncio.Task[pb.TrainStepResponse]] = OrderedDict()
        self._receiving = 0
        self._round = weights_pb2.Round()  # the newest that a PREPARE has opened, until it is over
        # Id of the last step that was done since the policy was loaded or restored.
        self._step_id = ""
        # The version that a checkpoint or the initial model has.
        self._saved_version = 0
        # That of the checkpoint begun last.
        self._saving_version = 0
        self._is_leaving = False
        self._asked_s = -SILENT_S

    def serve_engine(self, engine: TrainerEngine, fence: FenceGuard | None = None) -> None:
        """Serve calls from now on: the model is loaded.

        Args:
            fence: knows the run's newest coordinator; None: there was none.
        """
        self._fence = self._fence if fence is None else fence
        self._engine = engine
        self._saved_version = engine.policy_version
        metrics.POLICY_VERSION.set(engine.policy_version)

    async def until_saved(self) -> None:
        """Say in the status that this trainer leaves; return when nothing is unsaved, or no caller asks."""
        self._is_leaving = True
        while self._has_unsaved() and time.monotonic() - self._asked_s < SILENT_S:  # noqa: ASYNC110 - time ends it too
            await asyncio.sleep(_LOOK_S)

    def _has_unsaved(self) -> bool:
        """Whether a step is running, or has been done since the last checkpoint."""
        if self._engine is None:
            return False
        is_training = any(not step.done() for step in self._steps.values())
        return is_training or self._engine.policy_version != self._saved_version

    def _ready(self) -> TrainerEngine:
        """Return the engine. Raises: NotReady: it is not loaded yet."""
        if self._engine is None:
            raise NotReady("the trainer is still loading its model")
        return self._engine

    async def TakeOver(self, request: pb.TakeOverRequest, context: Any) -> pb.TakeOverResponse:
        """Refuse older coordinators from now on; answer when the work that they started is done."""
        engine = self._ready()
        await self._fence.admit_soon(request.fence)
        if self._round.round_id:  # no one else ends it, if a peer of it is lost too
            await asyncio.to_thread(self._interrupt, self._round.round_id)
        await self._command(Command.NOOP, b"")  # commands run one at a time: this one waits for theirs
        await self._settled(engine)
        return pb.TakeOverResponse(policy_version=engine.policy_version)

    async def TrainStep(
        self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Any
    ) -> pb.TrainStepResponse:
        """Run one GRPO step; a repeated step_id gets the first reply."""
        engine = self._ready()
        step = await receive_header(request_iterator, self._max_samples)
        step_id, fence = step.header.step_id, step.header.fence
        await self._fence.admit_soon(fence)
        if step_id not in self._steps:
            check_version(step.header.policy_version, engine.policy_version)
            with self._room():
                await receive_chunks(request_iterator, step, engine.limits)
                # in a thread: a large batch must not delay health checks
                parts = await asyncio.to_thread(_step_parts, step, engine)
            self._fence.admit(fence)  # another coordinator may have taken over meanwhile
            if step_id not in self._steps:  # another call may have brought the same step meanwhile
                self._steps[step_id] = asyncio.create_task(
                    self._train(step_id, step.started_s, parts), name=f"step-{step_id}"
                )
                self._forget_replies()
            del parts
        del step  # its messages: the arrays are with the task
        # a caller that disconnects must not stop a step that other ranks have begun
        return await asyncio.shield(self._steps[step_id])

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Have room for one more batch. Raises: Overloaded: too many are in memory."""
        training = sum(not step.done() for step in self._steps.values())
        if self._receiving + training >= MAX_BATCHES:
            raise Overloaded(
                f"{self._receiving} train steps are being received and {training} are to be trained; at most "
                f"{MAX_BATCHES} together, call again"
            )
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    def _forget_replies(self) -> None:
        """Forget the oldest replies; a step that has none yet counts as one in memory."""
        for step_id in [name for name, step in self._steps.items() if step.done()]:
            if len(self._steps) > KEPT_REPLIES:
                del self._steps[step_id]

    async def _train(self, step_id: str, started_s: float, parts: Sequence[bytes]) -> pb.TrainStepResponse:
        received_s = time.perf_counter() - started_s
        try:
            replies = await asyncio.wrap_future(self._commander.submit(Command.TRAIN_STEP, parts))
        except TandemError as error:
            self._steps.pop(step_id, None)
            metrics.STEPS.labels(result="not_finite" if isinstance(error, NotFinite) else "failed").inc()
            raise
        finally:
            del parts  # an error keeps this frame
        self._step_id = step_id
        response = pb.TrainStepResponse.FromString(replies[0])
        response.seconds["receive"] = received_s
        response.seconds["total"] = time.perf_counter() - started_s
        metrics.observe_step(response.metrics, response.seconds, response.policy_version)
        log.info(
            "train step done",
            step_id=step_id,
            policy_version=response.policy_version,
            loss=response.metrics["loss"],
            grad_norm=response.metrics["grad_norm"],
            seconds=round(response.seconds["total"], 4),
        )
        return response

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Any
    ) -> AsyncIterator[pb.ComputeLogprobsResponse]:
        """Compute log-probs and entropies; one reply per message, in order."""
        engine = self._ready()
        async for request in request_iterator:
            samples = await asyncio.to_thread(merge, [request.chunk], engine.limits)
            asked = pb.ComputeLogprobsRequest(reference=request.reference).SerializeToString()
            parts = [asked, *samples.to_parts()]
            replies = await asyncio.wrap_future(self._commander.submit(Command.LOGPROBS, parts))
            yield pb.ComputeLogprobsResponse.FromString(replies[0])

    async def RunPhase(self, request: weights_pb2.RunPhaseRequest, context: Any) -> weights_pb2.RunPhaseResponse:
        """Run a phase of a sync round on every rank."""
        self._ready()
        if only_phase(request) not in RULES:
            raise InvalidRequest(f"phase {request.phase} is no phase of a round")
        await self._fence.admit_soon(request.round.fence)
        if ended := self._ended_by(request):
            # Bypasses the queue: a running command that waits for a lost peer would delay this one until its deadline.
            await asyncio.to_thread(self._interrupt, ended)
        with metrics.PUBLISH_SECONDS.labels(phase=name_of(request.phase)).time():
            # Ranks keep to the round's deadlines: one that is late is frozen, and must not delay the fleet.
            replies = await self._command(
                Command.PUBLISH, request.SerializeToString(), deadlines.command_s(request.round)
            )
        reports = [weights_pb2.PhaseReport.FromString(reply) for reply in replies]
        if request.phase in (COMMIT, ABORT) and self._round.round_id == request.round.round_id:
            self._round = weights_pb2.Round()
        metrics.observe_phase(request.phase, reports)
        return weights_pb2.RunPhaseResponse(reports=reports)

    def _ended_by(self, request: weights_pb2.RunPhaseRequest) -> str:
        """Return the id of the round whose own phase a call need not wait for; empty: there is none."""
        opened, ours = self._round, request.round
        if request.phase == ABORT:
            return ours.round_id
        is_older = (ours.epoch, ours.policy_version) < (opened.epoch, opened.policy_version)
        if request.phase != PREPARE or is_older or ours.round_id == opened.round_id:
            return ""
        self._round = ours
        return opened.round_id

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        """Write weights, optimizer and random states to a folder, or begin to."""
        engine = self._ready()
        await asyncio.to_thread(replaceable, request.path, self._run_dir, "path", CHECKPOINT)
        await self._fence.admit_soon(request.fence)
        await self._settled(engine)
        begun_s = time.perf_counter()
        with metrics.CHECKPOINT_BLOCKING_SECONDS.time():
            replies = await self._command(Command.SAVE, request.SerializeToString())
        response = pb.SaveCheckpointResponse.FromString(replies[0])
        if response.writing and engine.saving is not None:
            engine.saving.done.add_done_callback(partial(_note_saved, request.path, response, begun_s))
        else:
            _note_saved(request.path, response, begun_s)
            self._saved_version = response.policy_version
        self._saving_version = response.policy_version
        return response

    async def FinishCheckpoint(self, request: pb.FinishCheckpointRequest, context: Any) -> pb.FinishCheckpointResponse:
        """Wait for the checkpoint that SaveCheckpoint began."""
        saving = self._ready().saving
        await self._fence.admit_soon(request.fence)
        if saving is None or saving.folder != Path(request.path):
            raise NotReady(f"checkpoint {request.path} is not being written by this trainer")
        num_bytes = await _end_of(saving)
        self._saved_version = self._saving_version
        return pb.FinishCheckpointResponse(bytes=num_bytes)

    async def _settled(self, engine: TrainerEngine) -> None:
        """Wait until no checkpoint is being written; FinishCheckpoint says how that ended."""
        if engine.saving is not None:
            with contextlib.suppress(TandemError):
                await _end_of(engine.saving)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> pb.ExportModelResponse:
        """Write the policy as a Hugging Face folder."""
        self._ready()
        await asyncio.to_thread(replaceable, request.path, self._run_dir, "path", EXPORT)
        await self._fence.admit_soon(request.fence)
        replies = await self._command(Command.EXPORT, request.SerializeToString())
        response = pb.ExportModelResponse.FromString(replies[0])
        log.info("model exported", path=request.path, policy_version=response.policy_version)
        return response

    async def RestorePolicy(self, request: pb.RestorePolicyRequest, context: Any) -> pb.RestorePolicyResponse:
        """Go back to a checkpoint or the initial model, under a new version."""
        own = self._ready().policy_version
        if request.policy_version < own:
            raise InvalidRequest(f"version {request.policy_version} is less than the trainer's own, {own}")
        if request.path:
            await asyncio.to_thread(inside, request.path, self._run_dir, "path")
            await self._fence.admit_soon(request.fence)
            # Every rank checks its files before any rank changes a weight: a policy restored in part is useless.
            await self._command(Command.CHECK_CHECKPOINT, request.SerializeToString())
        await self._fence.admit_soon(request.fence)
        replies = await self._command(Command.RESTORE, request.SerializeToString())
        response = pb.RestorePolicyResponse.FromString(replies[0])
        self._saved_version, self._step_id = response.policy_version, ""
        metrics.POLICY_VERSION.set(response.policy_version)
        log.warning("policy restored", path=request.path or "initial model", policy_version=response.policy_version)
        return response

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """Report version, parallel sizes, activity and software versions, and whether it leaves."""
        engine = self._ready()
        self._asked_s = time.monotonic()
        current = self._commander.current
        return pb.GetStatusResponse(
            policy_version=engine.policy_version,
            parallel=engine.parallel.to_proto(),
            world_size=engine.parallel.world_size,
            activity="idle" if current is Command.NOOP else current.name.lower(),
            versions=common_pb2.SoftwareVersions(packages=software_versions(PACKAGES)),
            settings_digest=self._settings_digest,
            leaving=self._is_leaving and self._has_unsaved(),
            step_id=self._step_id,
        )

    async def _command(self, command: Command, body: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Run a command on all ranks; a caller that disconnects does not cancel it. Returns: the reply of each rank."""
        replies = asyncio.wrap_future(self._commander.submit(command, [body], timeout_s))
        # Retrieve the error: without a caller that awaits it, asyncio would log it once more.
        replies.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(replies)


async def _end_of(saving: Saving) -> int:
    """Wait for a checkpoint. Returns: its bytes. Raises: Internal: it was not written."""
    return await asyncio.shield(asyncio.wrap_future(saving.done))


def _note_saved(
    path: str, response: pb.SaveCheckpointResponse, begun_s: float, done: "Future[int] | None" = None
) -> None:
    """Record a checkpoint; `done`: one that was written during the training, which may have failed."""
    if done is not None and (error := done.exception()) is not None:
        log.error("checkpoint not saved", path=path, error=str(error))
        return
    metrics.CHECKPOINT_SECONDS.observe(time.perf_counter() - begun_s)
    log.info("checkpoint saved", path=path, policy_version=response.policy_version, bytes=response.bytes)


def _step_parts(step: ReceivedStep, engine: TrainerEngine) -> list[bytes]:
    """Build the command of a step: join and check the samples here, once, so that all ranks get arrays.

    Raises: InvalidRequest: as merge and check_updates.
    """
    samples = merge(step.chunks, engine.limits)
    check_updates(samples, step.header.num_updates, step.header.num_samples)
    return [step.header.SerializeToString(), *samples.to_parts()]
