"""Where a trainer checkpoint has which tensors: names of its files by rank, and its meta.json. Needs no torch.

meta.json                        format, optimizer, extra, policy_version, run_id, model, dtype, parallel sizes; where
                                 extra is true also steps_done, skipped_updates
shard-tp00-pp00.safetensors      weights/NAME, main/NAME (bfloat16 only), exp_avg/NAME, exp_avg_sq/NAME, step/NAME,
                                 where extra is true rng/cpu, rng/device (CUDA only), rng/tracker/NAME; where
                                 "reference": true (grpo.reference_refresh_every) also reference/NAME
experts-etp00-ep00-pp00.safetensors    the same of experts, which have parallel sizes of their own
digests.json                     of all of these (tandem_files/digests.py)

The metadata of every safetensors file repeat policy_version and run_id: files of two checkpoints are not read together.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from servicekit.errors import ConfigError
from tandem_files.digests import MANIFEST, Digest, read_manifest
from tandem_files.run_paths import FolderKind
from trainer_service.identity import differences
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import TRAINER_ENGINE

Value = TypeVar("Value")

CHECKPOINT = FolderKind(name="a trainer checkpoint", mark="meta.json", entry=re.compile(r"[\w.-]+\.(json|safetensors)"))

FORMAT = 1
META = "meta.json"
# Kind of the parameters' values.
WEIGHTS = "weights"
# In meta.json: whether there is more than weights (trainer.checkpoint_optimizer).
OPTIMIZER = "optimizer"
# In meta.json: whether there are random states and counts of steps (trainer.checkpoint_extra).
EXTRA = "extra"
# In meta.json: the run's id; older releases and imported policies do not have it, nor the marks below.
RUN_ID = "run_id"
_STEP_MARK, _RUN_MARK = "tandem.policy_version", "tandem.run_id"
# Part of the name of an expert's parameter.
EXPERTS = ".local_experts."


def shard_file(tensor: int, pipeline: int) -> str:
    """Return the file of a rank's parameters that are not experts'.

    >>> shard_file(1, 0)
    'shard-tp01-pp00.safetensors'
    """
    return f"shard-tp{tensor:02d}-pp{pipeline:02d}.safetensors"


def experts_file(expert_tensor: int, expert: int, pipeline: int) -> str:
    """Return the file of a rank's experts.

    >>> experts_file(0, 1, 0)
    'experts-etp00-ep01-pp00.safetensors'
    """
    return f"experts-etp{expert_tensor:02d}-ep{expert:02d}-pp{pipeline:02d}.safetensors"


def file_of(name: str, rank: int, parallel: Parallel) -> str:
    """Return the file that has a parameter of a rank, in Megatron's order of ranks (weightsync/layouts/megatron.py).

    >>> file_of("decoder.final_layernorm.weight", 3, Parallel(tensor=2, pipeline=2))
    'shard-tp01-pp01.safetensors'
    """
    pipeline, place = divmod(rank, parallel.stage_size)
    if EXPERTS not in name:
        return shard_file(place % parallel.tensor, pipeline)
    return experts_file(place % parallel.expert_tensor, place // parallel.expert_tensor % parallel.expert, pipeline)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json. Raises: ConfigError: the folder is not a checkpoint of this format."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a trainer checkpoint: it has no {META}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / META} cannot be read: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise ConfigError(f"{folder} has checkpoint format {found!r}; this trainer reads {FORMAT}")
    lacks = [name for name in ("model", "dtype", "parallel", "policy_version") if name not in meta]
    if lacks:
        raise ConfigError(f"{folder / META} lacks {', '.join(lacks)}: restore it from a copy")
    return meta


def fitting_meta(folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Read meta.json of a checkpoint that a run is to read.

    Args:
        own: what identifies the run (trainer_service.identity).
    Raises: ConfigError: it is not a checkpoint, or of another model or type; all that differs is named.
    """
    meta = read_meta(folder)
    different = differences(meta, own)
    if different:
        raise ConfigError(f"checkpoint {folder} is of another run than this: {'; '.join(different)}")
    return meta


def mark_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return what the files of a checkpoint say of it in their metadata."""
    return {_STEP_MARK: str(meta["policy_version"]), _RUN_MARK: str(meta.get(RUN_ID, ""))}


def check_mark(path: Path, metadata: Mapping[str, str], meta: Mapping[str, Any]) -> None:
    """Check that a file is of the checkpoint in whose folder it is. Raises: ConfigError."""
    own = mark_of(meta)
    found = {name: metadata[name] for name in own if name in metadata}
    # Without one: of an older release, of which the whole checkpoint then is, or an imported policy.
    if found != own and (found or own[_RUN_MARK]):
        raise ConfigError(
            f"{path} is {_marked(found)}, and {META} {_marked(own)}: the folder's files are of different checkpoints; "
            "restore it from a copy, or choose another checkpoint"
        )


def _marked(mark: Mapping[str, str]) -> str:
    if not mark:
        return "without a mark"
    return f"of policy version {mark.get(_STEP_MARK)} of run {mark.get(_RUN_MARK)!r}"


def read_digests(folder: Path) -> tuple[dict[str, Digest], list[str]]:
    """Read the digests of a checkpoint's files, which are not read. Returns: the digests; faults, as text."""
    if not folder.is_dir():
        return {}, ["there is no such folder"]
    try:
        digests = read_manifest(folder)
    except (OSError, ValueError) as error:
        return {}, [f"{MANIFEST} cannot be read ({error})"]
    unknown = [path.name for path in sorted(folder.glob("*.safetensors")) if path.name not in digests]
    return digests, [f"{name} is not in {MANIFEST}" for name in unknown]


def has_optimizer(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds AdamW's state; older ones, which do not say it, do."""
    return bool(meta.get(OPTIMIZER, True))


def has_extra(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds random states and counts of steps; older ones, which do not say it, do."""
    return bool(meta.get(EXTRA, True))


def weights_only(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the parameters' values among the tensors of a rank, by "kind/parameter"."""
    return {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] == WEIGHTS}


def parallel_of(folder: Path, meta: dict[str, Any]) -> Parallel:
    """Return the parallel sizes of the trainer that wrote a checkpoint. Raises: ConfigError: meta.json has none."""
    try:
        return Parallel(**{**meta["parallel"], "engine": TRAINER_ENGINE})
    except (KeyError, TypeError):
        raise ConfigError(
            f"{folder / META} has no usable parallel sizes ({meta.get('parallel')!r}): it was not written by this "
            "release, or was changed; restore it from a copy"
        ) from None
