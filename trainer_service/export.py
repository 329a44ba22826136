"""`python -m trainer_service.export RUN_DIR --out DIR`: a Hugging Face folder from a checkpoint, without its services.

This is `tandem export` where the launcher is not installed: in the trainer's image, which has torch.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from tandem_config.sections.run import ModelSection
from tandem_files.exports import EXPORT, noted_template
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_paths import FolderKind
from trainer_service.checkpoints.find import FoundCheckpoint, find_checkpoint, run_above
from weightsync.model.spec import ModelSpec

if TYPE_CHECKING:
    from trainer_service.checkpoints.policy import SavedPolicy

Form = Literal["hf", "dist"]
Dtype = Literal["same", "float32", "bfloat16", "float16"]
Warn = Callable[[str], None]
# What dist_checkpointing and we write; RELEASE and TRACKER of megatron_engine/dist_export.py.
_DIST = FolderKind(
    name="an export in the format dist",
    mark="latest_checkpointed_iteration.txt",
    entry=re.compile(r"latest_checkpointed_iteration\.txt|common\.pt|metadata\.json|\.metadata|__\d+_\d+\.distcp"),
    folders=frozenset({"release"}),
)
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """What is exported: a checkpoint and its configuration, as the command line names them.

    Attributes:
        run_dir: the run's folder; None: `checkpoint` is a folder.
        checkpoint: last, best, an iteration, or a folder (`find_checkpoint`).
        config: the run's configuration; None: the one in the run's folder.
        overrides: of its keys.
        dtype: of the weights; same: the checkpoint's.
    """

    run_dir: Path | None
    checkpoint: str = "last"
    config: Path | None = None
    overrides: Sequence[str] = ()
    dtype: Dtype = "same"

    def model(self) -> ModelSection:
        """Read the model's section. Raises: ConfigErrors, ConfigError."""
        config = _config_of(self) if self.config is None else self.config
        return load_config(config, self.overrides).model

    def find(self, warn: Warn) -> FoundCheckpoint:
        """Find the checkpoint. Raises: ConfigError."""
        chosen = find_checkpoint(self.run_dir, self.checkpoint)
        for damage in chosen.skipped:
            warn(f"warning: {damage}")
        return chosen

    def open(self, chosen: FoundCheckpoint, model: ModelSection, stack: ExitStack) -> "SavedPolicy":
        """Open the weights, in the type asked for. Raises: ConfigError."""
        # Not above: torch takes seconds to import, and other mistakes are found without it.
        import torch

        from trainer_service.checkpoints.policy import SavedPolicy

        dtype: torch.dtype | None = None if self.dtype == "same" else getattr(torch, self.dtype)
        return SavedPolicy(chosen.folder, _spec_of(model), stack, dtype)


def export(source: ExportSource, out: Path, warn: Warn, *, form: Form = "hf") -> str:
    """Write a checkpoint as a Hugging Face folder, or for Megatron-LM.

    Args:
        warn: called with each newer checkpoint that is damaged.
        form: hf, or dist: megatron-core's dist_checkpointing.
    Returns: what was written, as a sentence.
    Raises: ConfigErrors, ConfigError: something given is wrong; OSError: the folder cannot be written.
    """
    if form == "dist" and source.dtype != "same":
        raise ConfigError(
            f"--dtype {source.dtype} is for --format hf; the format dist has the checkpoint's: leave it out"
        )
    model = source.model()
    _check_out(out, EXPORT if form == "hf" else _DIST)
    chosen = source.find(warn)
    if form == "dist":
        from trainer_service.megatron_engine.dist_export import write_dist

        written = write_dist(chosen.folder, _spec_of(model), out.absolute())
    else:
        written = _write(source, chosen, model, out.absolute())
    return f"{chosen.title} is in {out} ({_size(written)} of weights)"


def compare_export(source: ExportSource, reference: Path, warn: Warn, *, tolerance: float = 0.0) -> tuple[bool, str]:
    """Compare a checkpoint with a Hugging Face folder; nothing is written.

    Args:
        tolerance: how far apart two numbers may be. >= 0.
    Returns: whether both have the same tensors, with numbers that near; how they differ, as a sentence.
    Raises: ConfigErrors, ConfigError.
    """
    model = source.model()
    chosen = source.find(warn)
    from trainer_service.checkpoints.compare import compare

    with ExitStack() as stack:
        found = compare(source.open(chosen, model, stack), reference)
    alike = found.is_within(tolerance)
    over = "" if alike or found.faults else f" (--tolerance {tolerance:g})"
    return alike, f"{chosen.title} against {reference}: {found}{over}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns: the exit code, as `tandem export`."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_service.export", description="A Hugging Face folder from a checkpoint of a run."
    )
    parser.add_argument("run_dir", type=Path, nargs="?", help="the run's folder; none: --checkpoint is a folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to write; an earlier export is replaced")
    what.add_argument("--test", type=Path, metavar="DIR", help="write nothing, compare with this Hugging Face folder")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of --test: how far apart numbers may be")
    parser.add_argument("--format", choices=get_args(Form), default="hf", help="dist: for Megatron-LM")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="same", help="of the weights; same: as they are")
    parser.add_argument(
        "--checkpoint", default="last", help="last (default), best, number of an iteration, or a folder"
    )
    parser.add_argument("--config", "-c", type=Path, help="the run's configuration; default: the one in its folder")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    options = parser.parse_args(arguments)
    source = ExportSource(
        run_dir=options.run_dir,
        checkpoint=options.checkpoint,
        config=options.config,
        overrides=options.set,
        dtype=options.dtype,
    )

    def warn(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        if options.test is not None:
            alike, text = compare_export(source, options.test, warn, tolerance=options.tolerance)
            print(text)
            return EXIT_OK if alike else EXIT_FAILED
        print(export(source, options.out, warn, form=options.format))
    except (ConfigErrors, ConfigError) as error:
        warn(f"not exported: {error}")
        return EXIT_BAD_CONFIG
    except OSError as error:
        warn(f"failed: cannot write {options.out}: {error}")
        return EXIT_FAILED
    return EXIT_OK


def _config_of(source: ExportSource) -> Path:
    """Return the configuration in the folder of a source's run. Raises: ConfigError: there is none."""
    run_dir = source.run_dir
    if run_dir is None:
        if source.checkpoint in ("last", "best"):
            raise ConfigError("give the folder of a run, or a checkpoint's with --checkpoint DIR")
        run_dir = run_above(Path(source.checkpoint))
    if run_dir is None:
        raise ConfigError(
            f"--checkpoint {source.checkpoint} lies in no run's folder: give the configuration of its model with -c"
        )
    path = run_dir / RESOLVED_CONFIG
    if not path.is_file():
        what = f"{run_dir} has no {RESOLVED_CONFIG}" if run_dir.is_dir() else f"{run_dir}: no such folder"
        raise ConfigError(
            f"{what}: give the folder of a run, and with -c its configuration if it was not `tandem run`'s; "
            "a checkpoint that lies in no run's folder with --checkpoint DIR"
        )
    return path


def _check_out(out: Path, kind: FolderKind) -> None:
    """Check that a folder may be written or replaced. Raises: ConfigError: it holds something else than an export."""
    try:
        free = not (out.exists() or out.is_symlink()) or kind.is_in(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be listed: {error}") from None
    if not free:
        raise ConfigError(f"--out {out} holds something else than {kind.name}: choose a new folder")


def _write(source: ExportSource, chosen: FoundCheckpoint, model: ModelSection, out: Path) -> int:
    """Write the folder. Returns: bytes of the weights. Raises: ConfigError; OSError: e.g. the disk is full."""
    # Not above: torch takes seconds to import, and other mistakes are found without it.
    from safetensors import SafetensorError

    from weightsync.transfer.hf_files import write_folder

    with ExitStack() as stack:
        policy = source.open(chosen, model, stack)
        num_bytes = policy.num_bytes()
        _check_room(out, sum(num_bytes.values()))
        about: dict[str, Any] = {"iteration": chosen.iteration, "policy_version": policy.policy_version}
        try:
            return write_folder(
                policy,
                model.path,
                out,
                tokenizer=model.tokenizer_path,
                num_bytes=num_bytes,
                about=about,
                template=noted_template(chosen.run_dir),
            )
        except SafetensorError as error:  # how safetensors reports a failed write
            raise OSError(str(error)) from error


def _spec_of(model: ModelSection) -> ModelSpec:
    """Read the model's sizes. Raises: ConfigError: its folder is not there."""
    if not (model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path {model.path} has no config.json: --set model.path=DIR says where the model is now"
        )
    return ModelSpec.from_folder(model.path)


def _size(num_bytes: int) -> str:
    """Return a size in GiB, a small one in MiB.

    >>> _size(3 * 2**29), _size(2**20 // 4)
    ('1.50 GiB', '0.25 MiB')
    """
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.2f} MiB"


def _check_room(out: Path, needed: int) -> None:
    """Check the free space. Raises: ConfigError."""
    parent = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        space = f"{_size(needed)}, and {parent} has {_size(free)} free"
        raise ConfigError(f"--out {out} needs {space}: choose another folder")


if __name__ == "__main__":
    sys.exit(main())
