"""`python -m trainer_service.export RUN_DIR --out DIR`: a Hugging Face folder from a checkpoint, without its services.

This is `tandem export` where the launcher is not installed: in the trainer's image, which has torch.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from servicekit.errors import ConfigError
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from tandem_config.sections.run import ModelSection
from tandem_files.checkpoints import TRAINER_FOLDER, Sound, choose
from tandem_files.exports import EXPORT, noted_template
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_paths import FolderKind
from weightsync.model.spec import ModelSpec

Form = Literal["hf", "dist"]
# What dist_checkpointing and we write; RELEASE and TRACKER of megatron_engine/dist_export.py.
_DIST = FolderKind(
    name="an export in the format dist",
    mark="latest_checkpointed_iteration.txt",
    entry=re.compile(r"latest_checkpointed_iteration\.txt|common\.pt|metadata\.json|\.metadata|__\d+_\d+\.distcp"),
    folders=frozenset({"release"}),
)
_GIB, _MIB = 2**30, 2**20


def export(
    run_dir: Path,
    which: str,
    out: Path,
    config: Path | None,
    overrides: Sequence[str],
    warn: Callable[[str], None],
    *,
    form: Form = "hf",
) -> str:
    """Write a checkpoint of a run as a Hugging Face folder, or for Megatron-LM.

    Args:
        which: the checkpoint, as `choose` takes it.
        form: hf, or dist: megatron-core's dist_checkpointing.
        config: the run's configuration; None: the one in its folder.
        warn: called with each newer checkpoint that is damaged.
    Returns: what was written, as a sentence.
    Raises: ConfigErrors, ConfigError: something given is wrong; OSError: the folder cannot be written.
    """
    model = load_config(_config_of(run_dir) if config is None else config, overrides).model
    _check_out(out, EXPORT if form == "hf" else _DIST)
    checkpoint = choose(run_dir, which)
    for damage in checkpoint.skipped:
        warn(f"warning: {damage}")
    if form == "dist":
        from trainer_service.megatron_engine.dist_export import write_dist

        written = write_dist(checkpoint.folder / TRAINER_FOLDER, _spec_of(model), out.absolute())
    else:
        written = _write(checkpoint, model, out.absolute(), noted_template(run_dir))
    return f"iteration {checkpoint.iteration} of {run_dir} is in {out} ({_size(written)} of weights)"


def compare_export(
    run_dir: Path,
    which: str,
    reference: Path,
    config: Path | None,
    overrides: Sequence[str],
    warn: Callable[[str], None],
) -> tuple[bool, str]:
    """Compare a checkpoint of a run with a Hugging Face folder; arguments as those of `export`, nothing is written.

    Returns: whether both have the same tensors; how they differ, as a sentence.
    Raises: ConfigErrors, ConfigError.
    """
    model = load_config(_config_of(run_dir) if config is None else config, overrides).model
    checkpoint = choose(run_dir, which)
    for damage in checkpoint.skipped:
        warn(f"warning: {damage}")
    from trainer_service.saved.compare import compare
    from trainer_service.saved.policy import SavedPolicy

    with ExitStack() as stack:
        policy = SavedPolicy(checkpoint.folder / TRAINER_FOLDER, _spec_of(model), stack)
        found = compare(policy, reference)
    return not found.faults, f"iteration {checkpoint.iteration} of {run_dir} against {reference}: {found}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns: the exit code, as `tandem export`."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_service.export", description="A Hugging Face folder from a checkpoint of a run."
    )
    parser.add_argument("run_dir", type=Path, help="the run's folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to write; an earlier export is replaced")
    what.add_argument("--test", type=Path, metavar="DIR", help="write nothing, compare with this Hugging Face folder")
    parser.add_argument("--format", choices=("hf", "dist"), default="hf", help="dist: for Megatron-LM")
    parser.add_argument("--checkpoint", default="last", help="last (default), best, or the number of an iteration")
    parser.add_argument("--config", "-c", type=Path, help="the run's configuration; default: the one in its folder")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    options = parser.parse_args(arguments)

    def warn(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        if options.test is not None:
            same, text = compare_export(
                options.run_dir, options.checkpoint, options.test, options.config, options.set, warn
            )
            print(text)
            return EXIT_OK if same else EXIT_FAILED
        chosen = (options.run_dir, options.checkpoint, options.out, options.config, options.set)
        print(export(*chosen, warn, form=options.format))
    except (ConfigErrors, ConfigError) as error:
        warn(f"not exported: {error}")
        return EXIT_BAD_CONFIG
    except OSError as error:
        warn(f"failed: cannot write {options.out}: {error}")
        return EXIT_FAILED
    return EXIT_OK


def _config_of(run_dir: Path) -> Path:
    """Return the configuration in a run's folder. Raises: ConfigError: it has none."""
    path = run_dir / RESOLVED_CONFIG
    if not path.is_file():
        what = f"{run_dir} has no {RESOLVED_CONFIG}" if run_dir.is_dir() else f"{run_dir}: no such folder"
        raise ConfigError(
            f"{what}: give the folder of a run, and with -c its configuration if it was not `tandem run`'s"
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


def _write(checkpoint: Sound, model: ModelSection, out: Path, template: str | None) -> int:
    """Write the folder. Returns: bytes of the weights. Raises: ConfigError; OSError: e.g. the disk is full."""
    # Not above: torch takes seconds to import, and other mistakes are found without it.
    from safetensors import SafetensorError

    from trainer_service.saved.policy import SavedPolicy
    from weightsync.transfer.hf_files import write_folder

    spec = _spec_of(model)
    with ExitStack() as stack:
        policy = SavedPolicy(checkpoint.folder / TRAINER_FOLDER, spec, stack)
        num_bytes = policy.num_bytes()
        _check_room(out, sum(num_bytes.values()))
        about = {"iteration": checkpoint.iteration, "policy_version": policy.policy_version}
        try:
            return write_folder(
                policy,
                model.path,
                out,
                tokenizer=model.tokenizer_path,
                num_bytes=num_bytes,
                about=about,
                template=template,
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
