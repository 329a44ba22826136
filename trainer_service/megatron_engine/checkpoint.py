"""Checkpoints of the trainer: safetensors files of model shards and a meta.json, published by one rename.

trainer_service/checkpoints/files.py says what is in which file. Of ranks with equal state, the first one writes, and
all read. The reading trainer may have any other layout: a rank reads the blocks that it holds, from whichever files
have them (checkpoints/states.py). All files are compared with their digests before any rank changes anything.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servicekit.errors import ConfigError, Internal, TandemError
from servicekit.logs import get_logger
from tandem_files.atomic import check_room
from tandem_files.checkpoints import DamagedCheckpoint
from tandem_files.digests import damages
from trainer_service.checkpoints.files import (
    EXPERTS,
    experts_file,
    fitting_meta,
    has_extra,
    has_optimizer,
    mark_of,
    parallel_of,
    read_digests,
    read_meta,
    shard_file,
)
from trainer_service.checkpoints.parts import FlatPart, Held, shape_of
from trainer_service.checkpoints.shards import SavedShards
from trainer_service.checkpoints.states import SavedStates
from trainer_service.checkpoints.writing import (
    HostCopies,
    SavedFile,
    discard,
    partial_of,
    publish,
    wait_for_files,
    write_file,
    write_files,
)
from trainer_service.engine import Saving
from trainer_service.megatron_engine.zero import gathered
from trainer_service.step.agreement import WAIT_S, RankAgreement
from weightsync.layouts.layout import Layout, Parallel
from weightsync.model.spec import ModelSpec

# Accepts what tensors of one number each, AdamW's step counts, would get.
Accept = Callable[[Sequence[tuple[Tensor, float]]], None]

log = get_logger(__name__)


def any_numbers(numbers: Sequence[tuple[Tensor, float]]) -> None:
    """Accept any numbers: where no optimizer reads them."""


def _files(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> list[SavedFile]:
    """Return the files that this rank writes: of ranks with equal state, the first one does."""
    extra = _rng_state(device) if has_extra(meta) else {}
    experts = {name: tensor for name, tensor in tensors.items() if EXPERTS in name}
    mine, mark = [], mark_of(meta)
    if experts and parallel_state.get_expert_data_parallel_rank() == 0:
        name = experts_file(
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        mine.append(SavedFile(name=name, tensors=experts, mark=mark))
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        shard = {name: tensor for name, tensor in tensors.items() if name not in experts}
        mine.append(SavedFile(name=_own_shard(), tensors=shard | extra, mark=mark))
    return mine


def save(
    folder: Path, held: Mapping[str, Held], meta: Mapping[str, Any], device: torch.device, agreement: RankAgreement
) -> int:
    """Save a checkpoint; every rank must call this. The folder appears, or is replaced, when all shards are on disk.

    Args:
        meta: entries that must be equal when the folder is loaded, and the others of checkpoints/files.py.
    Returns: bytes of all shards, on every rank.
    Raises: Internal: on every rank, if any of them could not write, e.g. because the disk has no room.
    """
    what, partial, leads = f"write checkpoint {folder}", partial_of(folder), dist.get_rank() == 0
    mine = _files(_whole(held), meta, device)
    own = {name for file in mine for name in file.tensors}
    try:
        _make_room(what, partial, mine, agreement)
        parts = {name: tensor.cpu() for name, tensor in gathered(held) if name in own}
        mine = [
            replace(file, tensors={name: parts.get(name, tensor) for name, tensor in file.tensors.items()})
            for file in mine
        ]
        size = agreement.together(what, lambda: sum(write_file(partial, file) for file in mine))
        agreement.together(what, (lambda: publish(partial, folder, meta)) if leads else None)
    except Internal:
        if leads:
            discard(partial)
        raise
    return size


def _whole(held: Mapping[str, Held]) -> dict[str, Tensor]:
    """Return a tensor without memory in the place of each that is to be gathered."""
    return {name: shape_of(value) if isinstance(value, FlatPart) else value for name, value in held.items()}


def _make_room(what: str, partial: Path, mine: Sequence[SavedFile], agreement: RankAgreement) -> int:
    """Make an empty folder, where the disk has room for the files of all ranks. Returns: their bytes."""
    needed = agreement.together(what, lambda: sum(file.num_bytes for file in mine))

    def prepare() -> int:
        discard(partial)
        check_room(partial.parent, needed)
        partial.mkdir(parents=True)
        return 0

    agreement.together(what, prepare if dist.get_rank() == 0 else None)
    return needed


class BackgroundSaver:
    """Writes checkpoints in a thread of this rank, from copies of its tensors in host memory."""

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._mine: Future[Any] | None = None
        self.saving: Saving | None = None

    def begin(self, folder: Path, held: Mapping[str, Held], meta: Mapping[str, Any], device: torch.device) -> int:
        """Copy the tensors as they are now and begin to write them; every rank must call this.

        Returns: bytes of all tensors, on every rank. On rank 0, `saving` then says how it ends.
        Raises: Internal: on every rank, if there is no room for the files.
        """
        what, partial = f"write checkpoint {folder}", partial_of(folder)
        self._agreement.together(what, self._wait)
        mine = _files(_whole(held), meta, device)
        size = _make_room(what, partial, mine, self._agreement)
        # page-locking takes long, and the other ranks wait for it before they gather
        count = self._agreement.together(what, lambda: self._copies.reserve(mine))
        copies = self._copies.take(mine, gathered(held))
        if dist.get_rank() == 0:
            self._mine = self._thread.submit(_write_and_publish, partial, copies, count, folder, meta)
            self.saving = Saving(folder=folder, done=self._mine)
        else:
            self._mine = self._thread.submit(write_files, partial, copies)
        return size

    def _wait(self) -> int:
        """Wait until this rank has written the files of the checkpoint before, whose copies are overwritten next."""
        if self._mine is not None and wait([self._mine], WAIT_S).not_done:
            raise TimeoutError(f"the checkpoint before was not written within {WAIT_S:g} s")
        return 0


def _write_and_publish(
    partial: Path, mine: Sequence[SavedFile], count: int, folder: Path, meta: Mapping[str, Any]
) -> int:
    """On rank 0, in the thread: write its files, wait for those of the others, publish.

    Returns: bytes.
    Raises: Internal: rank 0 could not write, which it says immediately; or another rank left a note that it could not.
    """
    try:
        for file in mine:
            write_file(partial, file)
        wait_for_files(partial, count, WAIT_S)
        return publish(partial, folder, meta)
    except (OSError, SafetensorError, Internal) as error:
        raise Internal(f"cannot write checkpoint {folder}: {error}") from error
    finally:
        discard(partial)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The rank that reads a checkpoint, and the run that it must be of.

    Attributes:
        layout: megatron_layout of `spec` and `parallel`.
        meta: entries that the checkpoint's meta.json must have.
    """

    spec: ModelSpec
    parallel: Parallel
    layout: Layout
    rank: int
    meta: Mapping[str, Any]
    device: torch.device
    agreement: RankAgreement

    def check(self, folder: Path, tensors: Mapping[str, Held], accept: Accept = any_numbers) -> None:
        """Check what load() checks before it changes anything; arguments and errors are those of load()."""
        with ExitStack() as stack:
            self._find(folder, tensors, accept, stack)

    def load(self, folder: Path, tensors: Mapping[str, Held], accept: Accept = any_numbers) -> dict[str, Any]:
        """Fill this rank's tensors and random states; every rank must call this.

        The trainer that wrote the checkpoint may have had other parallel sizes. Random states are those of a rank of
        the same place: with other sizes they stay as they are.

        Args:
            accept: called with the numbers that tensors would get; raises ConfigError: the optimizer cannot hold them.
        Returns: the checkpoint's own meta.
        Raises, on every rank alike, with the first rank's finding and with nothing changed:
            ConfigError: another model or dtype, or a shard that lacks tensors; all that differs is named.
            DamagedCheckpoint: a file is not what was written.
        """
        with ExitStack() as stack:
            states = self._find(folder, tensors, accept, stack)
            states.fill()
        saved = read_meta(folder)
        if not has_optimizer(saved):
            log.warning("checkpoint without optimizer: AdamW starts anew", folder=str(folder))
        if not has_extra(saved):
            log.warning("checkpoint without extra: learning-rate schedule, skip budget start anew", folder=str(folder))
        if parallel_of(folder, saved) == self.parallel:
            _restore_rng(folder / _own_shard(), self.device)
        else:
            log.info("checkpoint of another layout read", folder=str(folder), bytes=states.num_bytes())
        return saved

    def _find(self, folder: Path, tensors: Mapping[str, Held], accept: Accept, stack: ExitStack) -> SavedStates:
        """Look for all that this rank reads; each file is compared with its digest by one rank."""
        damage = self.agreement.first_text("; ".join(_damages(folder, self.rank)))
        if damage:
            raise DamagedCheckpoint(
                f"checkpoint {folder}: {damage}: restore the file from a copy, or choose another checkpoint"
            )
        states, complaint = None, ""
        try:
            fitting_meta(folder, self.meta)
            states = SavedStates(SavedShards(folder, self.spec, stack), self.spec, self.layout, self.rank, tensors)
            accept(states.numbers())
        except (TandemError, SafetensorError, OSError) as error:  # no other rank may wait for this one
            complaint = str(error)
        complaint = self.agreement.first_text(complaint)
        if complaint or states is None:
            raise ConfigError(complaint)
        return states


def _damages(folder: Path, rank: int) -> list[str]:
    """Compare this rank's share of the files with their digests: each file is read by one rank."""
    digests, faults = read_digests(folder)
    mine = sorted(digests)[rank :: dist.get_world_size()]
    return faults + damages(folder, {name: digests[name] for name in mine})


def _own_shard() -> str:
    """Return the file of this rank's parameters that are not experts'."""
    return shard_file(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    )


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    out = {f"rng/tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    out["rng/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        out["rng/device"] = torch.cuda.get_rng_state(device)
    return out


def _restore_rng(path: Path, device: torch.device) -> None:
    with safe_open(path, framework="pt") as file:
        states = {name: file.get_tensor(name) for name in set(file.keys()) if name.startswith("rng/")}
    if not states:  # trainer.checkpoint_extra was false, or it is an imported policy (checkpoints/importing.py)
        return
    torch.set_rng_state(states["rng/cpu"])
    if device.type == "cuda" and "rng/device" in states:
        torch.cuda.set_rng_state(states["rng/device"], device)
    prefix = "rng/tracker/"
    tracked = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(tracked)
