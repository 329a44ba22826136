"""Train steps as they were sent, until there is a checkpoint after them: a trainer that is lost does them again.

It restores the checkpoint under the version that this had, and gets the same bytes under the same ids. So it comes to
the policies that it had, and nothing is generated, scored or noted in the ledger again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.record.state import RunState
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.flow import TrainBatch
from tandem_clients.trainer import step_requests
from tandem_files.checkpoints import COORDINATOR_FILE, TRAINER_FOLDER
from tandem_files.ledger.records import Record, framed, read_records, step_files

# Kinds of the records of a file: the step, then its messages, which end with it.
_STEP, _MESSAGE, _END = "redo", "message", "end"


@dataclass(frozen=True, kw_only=True)
class KeptStep:
    """A train step that can be done again.

    Attributes:
        version: of the policy that it begins with.
    """

    iteration: int
    step_id: str
    version: int
    path: Path

    def requests(self) -> Iterator[trainer_pb2.TrainStepRequest]:
        """Yield its messages, as they were sent."""
        for record in read_records(self.path):
            if isinstance(record, Record) and record.kind == _MESSAGE:
                yield trainer_pb2.TrainStepRequest.FromString(record.content)


@dataclass(frozen=True, kw_only=True)
class WayBack:
    """How a trainer that was lost comes back to where it was: a checkpoint, and the steps after it.

    Attributes:
        folder: the trainer's folder of the checkpoint; None: there is none, it begins with the initial model.
        version: of the checkpoint's policy.
    """

    folder: Path | None
    version: int
    steps: tuple[KeptStep, ...]


def step_records(iteration: int, after: str, batch: TrainBatch) -> Iterator[bytes]:
    """Yield the records that keep a step.

    Args:
        after: id of the step before it.
    """
    fields = {"iteration": iteration, "step": batch.step_id, "version": batch.policy_version, "after": after}
    yield framed(Record(kind=_STEP, fields=fields))
    for request in step_requests(batch):
        yield framed(Record(kind=_MESSAGE, fields={}, content=request.SerializeToString()))
    yield framed(Record(kind=_END, fields={}))


def way_back(run_dir: Path, folder: Path | None, version: int, step_id: str) -> WayBack | None:
    """Find the way from a checkpoint to a policy; None: there is none, because a step is not kept. Blocking.

    Args:
        folder: of the checkpoint; None: there is none.
        version: of the policy.
        step_id: of the step that led to it; "": no step has.
    Raises: OSError, ConfigError: what is needed cannot be read.
    """
    at = "" if folder is None else RunState.load(folder / COORDINATOR_FILE).step_id
    steps: list[KeptStep] = []
    for path in step_files(run_dir).values():
        found = None if at == step_id else _read(path, at)
        if found is not None:
            steps.append(found)
            at = found.step_id
    if at != step_id or [step.version for step in steps] != list(range(version - len(steps), version)):
        return None
    trainer = None if folder is None else (folder / TRAINER_FOLDER).absolute()
    return WayBack(folder=trainer, version=version - len(steps), steps=tuple(steps))


def _read(path: Path, after: str) -> KeptStep | None:
    """Read which step a file has; None: one that does not follow `after`, or a part of one."""
    records = read_records(path)
    first = next(records, None)
    if not isinstance(first, Record) or first.kind != _STEP or first.fields["after"] != after:
        return None
    kinds = [record.kind if isinstance(record, Record) else "" for record in records]
    if not kinds or kinds != [*[_MESSAGE] * (len(kinds) - 1), _END]:
        return None
    fields = first.fields
    return KeptStep(iteration=fields["iteration"], step_id=fields["step"], version=fields["version"], path=path)
