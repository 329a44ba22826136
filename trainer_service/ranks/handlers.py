"""Handlers of the commands on each rank: protobuf bytes in, engine call, protobuf bytes out."""

from collections.abc import Sequence
from pathlib import Path

from servicekit.errors import TandemError, WrongVersion
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from trainer_service.engine import TrainerEngine
from trainer_service.micro_batches.samples import Samples
from trainer_service.ranks.commands import Command, Handlers
from trainer_service.ranks.publish import Publisher


class CommandHandlers:
    """Applies commands to the engine and the publisher of this rank.

    Args:
        model: folder of the initial model.
    """

    def __init__(self, engine: TrainerEngine, publisher: Publisher, model: Path) -> None:
        self._engine, self._publisher, self._model = engine, publisher, model

    def table(self) -> Handlers:
        """Return the handlers; NOOP and STOP have none."""
        return {
            Command.TRAIN_STEP: self.train_step,
            Command.LOGPROBS: self.logprobs,
            Command.PUBLISH: self.publish,
            Command.SAVE: self.save,
            Command.EXPORT: self.export,
            Command.RESTORE: self.restore,
            Command.CHECK_CHECKPOINT: self.check_checkpoint,
        }

    def train_step(self, parts: Sequence[bytes]) -> bytes:
        """Run a train step. `parts`: TrainStepHeader, then the samples, which the servicer has checked.

        Commands queued earlier may have changed the version: every rank checks it before any collective.
        """
        header = pb.TrainStepHeader.FromString(parts[0])
        check_version(header.policy_version, self._engine.policy_version)
        result = self._engine.train_step(Samples.from_parts(parts[1:]), header.num_updates)
        response = pb.TrainStepResponse(policy_version=self._engine.policy_version)
        response.metrics.update(result.metrics)
        response.metrics.update(result.performance)
        response.seconds.update(result.seconds)
        return response.SerializeToString()

    def logprobs(self, parts: Sequence[bytes]) -> bytes:
        """Compute log-probs. `parts`: ComputeLogprobsRequest, then the samples, which the servicer has checked."""
        reference = pb.ComputeLogprobsRequest.FromString(parts[0]).reference
        logprobs, entropies = self._engine.logprobs(Samples.from_parts(parts[1:]), reference=reference)
        reply = pb.ComputeLogprobsResponse(logprobs_f32=logprobs.tobytes(), entropies_f32=entropies.tobytes())
        return reply.SerializeToString()

    def publish(self, parts: Sequence[bytes]) -> bytes:
        """Run a sync phase. `parts`: RunPhaseRequest."""
        request = weights_pb2.RunPhaseRequest.FromString(parts[0])
        return self._publisher.run(request.phase, request.round, self._engine.policy_version).SerializeToString()

    def save(self, parts: Sequence[bytes]) -> bytes:
        """Write a checkpoint, or begin to. `parts`: SaveCheckpointRequest."""
        request = pb.SaveCheckpointRequest.FromString(parts[0])
        beside = request.background or (request.background_on_gpus and self._engine.on_gpus)
        size = (self._engine.begin_save if beside else self._engine.save)(Path(request.path))
        version = self._engine.policy_version
        return pb.SaveCheckpointResponse(policy_version=version, bytes=size, writing=beside).SerializeToString()

    def export(self, parts: Sequence[bytes]) -> bytes:
        """Export the model. `parts`: ExportModelRequest."""
        size = self._engine.export(Path(pb.ExportModelRequest.FromString(parts[0]).path))
        return pb.ExportModelResponse(policy_version=self._engine.policy_version, bytes=size).SerializeToString()

    def check_checkpoint(self, parts: Sequence[bytes]) -> bytes:
        """Check a checkpoint, changing nothing. `parts`: RestorePolicyRequest.

        Raises: ConfigError: restoring it would fail.
        """
        path = pb.RestorePolicyRequest.FromString(parts[0]).path
        if path:
            self._engine.check_checkpoint(Path(path))
        return b""

    def restore(self, parts: Sequence[bytes]) -> bytes:
        """Restore a policy. `parts`: RestorePolicyRequest.

        Raises: RuntimeError: it failed, perhaps on some ranks only, so the trainer must end.
        """
        request = pb.RestorePolicyRequest.FromString(parts[0])
        try:
            if request.path:
                self._engine.load_checkpoint(Path(request.path))
            else:
                self._engine.load(self._model)
        except TandemError as error:
            raise RuntimeError(f"the policy was not restored: {error}") from error
        self._engine.renumber(request.policy_version)
        return pb.RestorePolicyResponse(policy_version=self._engine.policy_version).SerializeToString()


def check_version(asked: int, current: int) -> None:
    """Raises: WrongVersion: a step asks for another version than the trainer has."""
    if asked != current:
        raise WrongVersion(f"the step starts from policy version {asked}, the trainer has {current}")
