"""`tandem export`: a Hugging Face folder from a checkpoint of a run, without its services."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.text import Text

from launcher.report import print_problems
from launcher.view.run_view import make_console
from servicekit.errors import ConfigError
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from tandem_config.sections.run import ModelSection
from tandem_files.checkpoints import TRAINER_FOLDER, Sound, choose
from tandem_files.exports import EXPORT
from tandem_files.run_config import RESOLVED_CONFIG
from weightsync.model.spec import ModelSpec

_GIB = 2**30


def export_command(run_dir: Path, which: str, out: Path, config: Path | None, overrides: Sequence[str]) -> int:
    """Run `tandem export`. Returns: the exit code.

    Args:
        which: the checkpoint, as `choose` takes it.
        config: the run's configuration; None: the one in its folder.
    """
    console, complaints = make_console(), make_console(stderr=True)
    try:
        model = load_config(_config_of(run_dir) if config is None else config, overrides).model
        check_out(out)
        checkpoint = choose(run_dir, which)
        for damage in checkpoint.skipped:
            complaints.print(Text(f"warning: {damage}", style="bold yellow"))
        written = _write(checkpoint, model, out.absolute())
    except ConfigErrors as errors:
        print_problems(complaints, errors.problems)
        return EXIT_BAD_CONFIG
    except ConfigError as error:
        complaints.print(Text(f"not exported: {error}", style="bold red"))
        return EXIT_BAD_CONFIG
    except ModuleNotFoundError as error:  # in the coordinator's image
        complaints.print(Text(f"not exported: {error}: run this where Tandem is installed whole", style="bold red"))
        return EXIT_BAD_CONFIG
    except OSError as error:
        complaints.print(Text(f"failed: cannot write {out}: {error}", style="bold red"))
        return EXIT_FAILED
    text = f"iteration {checkpoint.iteration} of {run_dir} is in {out} ({written / _GIB:.2f} GiB of weights)"
    console.print(Text(text, style="bold green"))
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


def check_out(out: Path) -> None:
    """Check that a folder may be written or replaced. Raises: ConfigError: it holds something else than an export."""
    try:
        free = not (out.exists() or out.is_symlink()) or EXPORT.is_in(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be listed: {error}") from None
    if not free:
        raise ConfigError(f"--out {out} holds something else than {EXPORT.name}: choose a new folder")


def _write(checkpoint: Sound, model: ModelSection, out: Path) -> int:
    """Write the folder. Returns: bytes of the weights. Raises: ConfigError; OSError: e.g. the disk is full."""
    # Not above: torch takes seconds to import, and other mistakes are found without it.
    from safetensors import SafetensorError

    from trainer_service.saved_policy import SavedPolicy
    from weightsync.transfer.hf_files import write_folder

    if not (model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path {model.path} has no config.json: --set model.path=DIR says where the model is now"
        )
    with ExitStack() as stack:
        policy = SavedPolicy(checkpoint.folder / TRAINER_FOLDER, ModelSpec.from_folder(model.path), stack)
        num_bytes = policy.num_bytes()
        _check_room(out, sum(num_bytes.values()))
        about = {"iteration": checkpoint.iteration, "policy_version": policy.policy_version}
        try:
            return write_folder(
                policy, model.path, out, tokenizer=model.tokenizer_path, num_bytes=num_bytes, about=about
            )
        except SafetensorError as error:  # how safetensors reports a failed write
            raise OSError(str(error)) from error


def _check_room(out: Path, needed: int) -> None:
    """Check the free space. Raises: ConfigError."""
    parent = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        space = f"{needed / _GIB:.2f} GiB, and {parent} has {free / _GIB:.2f} GiB free"
        raise ConfigError(f"--out {out} needs {space}: choose another folder")
