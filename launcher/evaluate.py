"""`tandem evaluate`: a model folder against data files, without a run."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.data.scan_cache import RowIndex, write_indices
from launcher.check.data.columns import SYSTEMS
from launcher.check.preflight import preflight
from launcher.commands import redis_url, redis_url_with_files, start, write_config
from launcher.init.columns import answer_column, prompt_column, templated_column
from launcher.init.sample import first_row
from launcher.report import make_console
from launcher.view.run_view import RunView
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from tandem_config.loading import Draft, draft_config
from tandem_config.overrides import parse_overrides
from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from tandem_config.schema import DataSection, RunConfig
from tandem_files.rows.messages import prompt_of
from tandem_files.rows.problems import DataError
from tandem_files.rows.values import BadRow
from tandem_files.run_config import LAUNCHED_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import EVALUATION_FILE, claimed, read_evaluation

if TYPE_CHECKING:
    from launcher.run.run import RunRequest

# What --data sets.
_SET_BY_DATA = ("data.train", "evaluation.sets")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
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

    def options(self, columns: Mapping[str, str | None] | None = None) -> list[str]:
        """Return the `--set` options that this means, the user's own last.

        Args:
            columns: keys of the data's columns that were found.
        """
        # No trainer runs, whose start need not be there any more.
        options = ["rollout.serve_model=true", "trainer.initial_checkpoint=null"]
        if self.model is not None:
            options += [f"model.path={self.model}", f"run.name=evaluate-{_name(self.model.absolute())}"]
        if self.data:
            # A configuration has training data; these are not trained on.
            options += [
                f"data.train={self.data[0]}",
                "data.heldout=null",
                f"evaluation.sets={json.dumps(self._sets())}",
            ]
        found = [f"{key}={'null' if name is None else name}" for key, name in (columns or {}).items()]
        return [*options, *found, *self.overrides]

    @property
    def given(self) -> frozenset[str]:
        """The keys that the user's own `--set` options name; "reward" for any of a reward."""
        overrides, _ = parse_overrides(self.overrides)
        return frozenset(item.section if item.section == "reward" else item.key for item in overrides)

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


def evaluate_command(asked: EvaluationOptions) -> int:
    """Run `tandem evaluate`. Returns: the exit code."""
    complaints = make_console(stderr=True)
    draft, problems = draft_evaluation(asked)
    indices: list[RowIndex] = []
    problems = problems or preflight(draft, redis_url=redis_url(), indices=indices, trainer_ranks=0)
    if asked.data:
        problems = of_files(problems)
    if draft.config is not None and not draft.config.evaluation_sets():
        problems.append(_nothing_to_evaluate())
    return start(
        complaints,
        draft,
        problems,
        prepare=lambda stack, checked: _prepare(stack, checked, indices),
        run=_evaluate,
    )


def draft_evaluation(asked: EvaluationOptions) -> tuple[Draft, list[ConfigProblem]]:
    """Draft the configuration; without a file of it, with the columns of the first row's prompt and answer.

    Returns: the draft, and what is wrong with the columns.
    """
    draft = draft_config(asked.config, asked.options())
    if asked.config is not None or draft.config is None or not draft.usable("data.train"):
        return draft, []
    try:
        return draft_config(None, asked.options(_columns(draft.config.data, asked.given))), []
    except ConfigErrors as error:
        return draft, error.problems
    except (DataError, OSError):
        return draft, []  # `preflight` names it


def _columns(section: DataSection, given: Collection[str]) -> dict[str, str | None]:
    """Find the columns that the user has not named. Raises: ConfigErrors: none or several; DataError; OSError."""
    place, record = first_row(section, "train")
    found: dict[str, str | None] = {}
    prompt = section.prompt_key
    if "data.prompt_key" not in given:
        found["data.prompt_key"] = prompt = prompt_column(record, place, "--set data.prompt_key=COLUMN")
    if "data.answer_key" not in given:
        found["data.answer_key"] = answer_column(
            record,
            place,
            required="reward" not in given,
            option="--set data.answer_key=COLUMN",
            reward_option="--set reward.function=FILE.py:FUNCTION",
        )
    with suppress(BadRow):  # the check of all rows names it
        messages = prompt_of(record, prompt)
        if "data.system_key" not in given and isinstance(messages, list) and messages[0]["role"] != "system":
            found["data.system_key"] = templated_column(record, SYSTEMS)
    return found


def of_files(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """Name --data, which the user gave, instead of the keys that it sets; each problem once, and none of training."""
    renamed = [
        replace(problem, key="--data", where="") if problem.key in _SET_BY_DATA else problem
        for problem in problems
        if (problem.key, problem.severity) != ("grpo.prompts_per_iteration", "warning")
    ]
    return list(dict.fromkeys(renamed))


def _nothing_to_evaluate() -> ConfigProblem:
    return problem(
        "--data",
        "",
        "nothing to evaluate on",
        "give data files with --data, or -c with a configuration that has data.heldout or evaluation.sets",
    )


def _prepare(stack: ExitStack, config: RunConfig, indices: list[RowIndex]) -> "RunRequest":
    """Make a folder, lock it until `stack` ends, and write the configuration into it. Raises: ConfigError, OSError."""
    from launcher.run.run import RunRequest

    run_dir = stack.enter_context(claimed(config.run.output_dir, config.run.name))
    write_config(run_dir, config, LAUNCHED_CONFIG, RESOLVED_CONFIG)
    write_indices(run_dir, indices)
    indices.clear()  # they would take memory as long as the evaluation
    return RunRequest(config=config, run_dir=run_dir, redis_url=redis_url_with_files(), resume=False)


def _evaluate(request: "RunRequest") -> int:
    """Evaluate, and print the results. Returns: the exit code."""
    from launcher.run.evaluation import launch_evaluation
    from launcher.view.evaluation import print_evaluation

    console, run_dir = make_console(), request.run_dir
    view = RunView(console, 0)
    view.print_line(f"evaluating {request.config.model.path} in {run_dir}", "bold")
    outcome = launch_evaluation(request, view)
    results = read_evaluation(run_dir) if outcome.code == EXIT_OK else None
    if outcome.code == EXIT_OK and results is None:
        view.print_line(f"failed: no {run_dir / EVALUATION_FILE} was written", "bold red")
        return EXIT_FAILED
    if results is not None:
        print_evaluation(console, results)
    view.print_line(outcome.text, "bold red" if outcome.code else "bold green")
    return outcome.code
