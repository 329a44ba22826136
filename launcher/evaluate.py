"""`tandem evaluate`: a model folder against data files, without a run."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from launcher.check.preflight import preflight
from launcher.commands import redis_url, redis_url_with_files
from launcher.report import headline, print_problems
from launcher.view.run_view import RunView, make_console
from servicekit.errors import ConfigError
from servicekit.life.exit_codes import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tandem_config.loading import draft_config, dump_resolved
from tandem_config.problems import ConfigProblem, errors_only
from tandem_config.schema import RunConfig
from tandem_files.atomic import write_bytes_atomic
from tandem_files.run_config import LAUNCHED_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import EVALUATION_FILE, claimed, read_evaluation


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for.

    Attributes:
        data: files, one set each; none: the sets of the configuration.
    """

    model: Path | None
    data: Sequence[Path]
    config: Path | None
    samples: int
    temperature: float | None
    overrides: Sequence[str]

    def options(self) -> list[str]:
        """Return the `--set` options that this means, the user's own last."""
        options = ["rollout.serve_model=true"]
        if self.model is not None:
            options += [f"model.path={self.model}", f"run.name=evaluate-{_name(self.model.absolute())}"]
        if self.data:
            # A configuration has training data; these are not trained on.
            options += [
                f"data.train={self.data[0]}",
                "data.heldout=null",
                f"evaluation.sets={json.dumps(self._sets())}",
            ]
        return [*options, *self.overrides]

    def _sets(self) -> list[dict[str, Any]]:
        temperature = self.temperature if self.temperature is not None else 1.0 if self.samples > 1 else 0.0
        names = _different([_name(path.with_suffix("")) for path in self.data])
        return [
            {"name": name, "data": str(path.absolute()), "samples": self.samples, "temperature": temperature}
            for name, path in zip(names, self.data, strict=True)
        ]


def _name(path: Path) -> str:
    """Make a name of a file's or folder's own."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in path.name)
    return kept.strip("._-")[:40] or "set"


def _different(names: Sequence[str]) -> list[str]:
    """Number names that occur twice.

    >>> _different(["test", "dev", "test"])
    ['test', 'dev', 'test-2']
    """
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found


def evaluate_command(asked: Asked) -> int:
    """Run `tandem evaluate`. Returns: the exit code."""
    complaints = make_console(stderr=True)
    draft = draft_config(asked.config, asked.options())
    problems = preflight(draft, redis_url=redis_url())
    if draft.config is not None and not draft.config.evaluation_sets():
        problems.append(_nothing_to_evaluate())
    print_problems(complaints, problems)
    if draft.config is None or errors_only(problems):
        complaints.print(Text(f"not started: {headline(problems)}", style="bold red"))
        return EXIT_BAD_CONFIG
    with ExitStack() as stack:
        try:
            run_dir = stack.enter_context(claimed(draft.config.run.output_dir, draft.config.run.name))
            _write_config(draft.config, run_dir)
            url = redis_url_with_files()
        except (ConfigError, OSError) as error:
            complaints.print(Text(f"not started: {error}", style="bold red"))
            return EXIT_BAD_CONFIG
        return _evaluate(draft.config, run_dir, url)


def _nothing_to_evaluate() -> ConfigProblem:
    return ConfigProblem(
        key="--data",
        value="",
        message="nothing to evaluate on",
        suggestion="give data files with --data, or -c with a configuration that has data.heldout or evaluation.sets",
    )


def _write_config(config: RunConfig, run_dir: Path) -> None:
    (run_dir / LAUNCHED_CONFIG).parent.mkdir(exist_ok=True)
    for name in (LAUNCHED_CONFIG, RESOLVED_CONFIG):
        write_bytes_atomic(run_dir / name, dump_resolved(config).encode())


def _evaluate(config: RunConfig, run_dir: Path, url: str | None) -> int:
    """Evaluate, and print the results. Returns: the exit code."""
    from launcher.run.evaluation import EvaluationRequest, launch_evaluation
    from launcher.view.evaluation import print_evaluation

    console = make_console()
    view = RunView(console, 0)
    view.print_line(f"evaluating {config.model.path} in {run_dir}", "bold")
    outcome = launch_evaluation(EvaluationRequest(config=config, run_dir=run_dir, redis_url=url), view)
    results = read_evaluation(run_dir) if outcome.code == EXIT_OK else None
    if outcome.code == EXIT_OK and results is None:
        view.print_line(f"failed: no {run_dir / EVALUATION_FILE} was written", "bold red")
        return EXIT_FAILED
    if results is not None:
        print_evaluation(console, results)
    view.print_line(outcome.text, "bold red" if outcome.code else "bold green")
    return outcome.code
