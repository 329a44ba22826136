"""`tandem import`: a trainer checkpoint at a layout, from a Hugging Face folder, without services."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from launcher.report import print_problems
from launcher.view.run_view import make_console
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from trainer_service.checkpoints.files import CHECKPOINT
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

_MIB = 1 << 20


def import_command(config: Path, overrides: Sequence[str], out: Path) -> int:
    """Run `tandem import`. Returns: the exit code."""
    console, complaints = make_console(), make_console(stderr=True)
    begun_s = time.perf_counter()
    try:
        settings = load_config(config, overrides)
        spec, parallel = ModelSpec.from_folder(settings.model.path), Parallel(**settings.trainer.parallel_sizes)
        if out.exists() and not CHECKPOINT.is_in(out):
            raise ConfigError(f"--out {out} holds something else than {CHECKPOINT.name}: choose a new folder")
        import torch

        from trainer_service.checkpoints.importing import import_policy

        dtype: torch.dtype = getattr(torch, settings.model.dtype)
        written = import_policy(settings.model.path, spec, parallel, dtype, out.absolute())
    except ConfigErrors as errors:
        print_problems(complaints, errors.problems)
        return EXIT_BAD_CONFIG
    except ConfigError as error:
        complaints.print(Text(f"not imported: {error}", style="bold red"))
        return EXIT_BAD_CONFIG
    except OSError as error:
        complaints.print(Text(f"failed: cannot write {out}: {error}", style="bold red"))
        return EXIT_FAILED
    seconds = time.perf_counter() - begun_s
    ranks = "1 rank" if parallel.world_size == 1 else f"{parallel.world_size} ranks"
    text = f"{settings.model.path} is in {out}: {written / _MIB:.1f} MiB for {ranks}, {seconds:.1f} s"
    console.print(Text(text, style="bold green"))
    return EXIT_OK
