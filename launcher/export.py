"""`tandem export`: a Hugging Face folder from a checkpoint, of a run or alone, without services."""

from pathlib import Path

from rich.text import Text

from launcher.report import print_problems
from launcher.view.run_view import make_console
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.problems import ConfigErrors
from trainer_service.export import ExportSource, Form, compare_export, export

# What the coordinator's image lacks.
_ELSEWHERE = "run this where Tandem is installed whole, or in the trainer's image: python -m trainer_service.export"


def export_command(source: ExportSource, out: Path | None, test: Path | None, *, form: Form, tolerance: float) -> int:
    """Run `tandem export`; see trainer_service.export. Returns: the exit code."""
    console, complaints = make_console(), make_console(stderr=True)

    def warn(text: str) -> None:
        complaints.print(Text(text, style="bold yellow"))

    if (out is None) == (test is None):
        complaints.print(Text("not exported: give --out DIR to write, or --test DIR to compare", style="bold red"))
        return EXIT_BAD_CONFIG
    try:
        if test is not None:
            alike, text = compare_export(source, test, warn, tolerance=tolerance)
            console.print(Text(text, style="bold green" if alike else "bold red"))
            return EXIT_OK if alike else EXIT_FAILED
        if out is not None:
            console.print(Text(export(source, out, warn, form=form), style="bold green"))
    except ConfigErrors as errors:
        print_problems(complaints, errors.problems)
        return EXIT_BAD_CONFIG
    except ConfigError as error:
        complaints.print(Text(f"not exported: {error}", style="bold red"))
        return EXIT_BAD_CONFIG
    except ModuleNotFoundError as error:  # in the coordinator's image
        complaints.print(Text(f"not exported: {error}: {_ELSEWHERE}", style="bold red"))
        return EXIT_BAD_CONFIG
    except OSError as error:
        what = f"write {out}" if out is not None else f"compare with {test}"
        complaints.print(Text(f"failed: cannot {what}: {error}", style="bold red"))
        return EXIT_FAILED
    return EXIT_OK
