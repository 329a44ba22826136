"""Checks the data files row by row."""

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.check.data.answers import check_answers
from launcher.check.data.lengths import check_lengths, check_limits
from launcher.check.data.template import check_template
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.data_rows import Row, read_rows
from tandem_files.tokenizer import TextCodec
from weightsync.model.spec import ModelSpec

# Problems of one file that are listed; the rest is counted.
_SHOWN = 10


def check_data(
    config: RunConfig, usable: Callable[..., bool], spec: ModelSpec | None, codec: TextCodec | None
) -> list[ConfigProblem]:
    """Check the rows of the training and held-out data, their answers, chat template and lengths.

    Args:
        usable: whether all of the given keys have valid values.
        spec: the model, for its position limit; None: not checked.
        codec: the tokenizer, for lengths in tokens; None: not checked.
    """
    problems: list[ConfigProblem] = []
    longest = 0
    for part in ("train", "heldout"):
        path = config.data.train if part == "train" else config.data.heldout
        if path is None or not usable(f"data.{part}", "data.prompt_key", "data.answer_key"):
            continue
        rows, found = _check_rows(config, f"data.{part}", path)
        problems += found
        if usable("reward"):
            problems += check_answers(config, path, rows, key=f"data.{part}")
        if usable("model.path", "model.tokenizer_path"):
            problems += check_template(config, rows, key=f"data.{part}")
        if part == "train" and rows and usable("grpo.prompts_per_iteration"):
            problems += _check_enough(config, len(rows))
        if codec is not None and usable("data.max_prompt_tokens", "data.overlong_prompts"):
            length, found = check_lengths(config, path, rows, codec, key=f"data.{part}")
            longest = max(longest, length)
            problems += found
    if usable(
        "grpo.max_new_tokens",
        "trainer.max_tokens_per_micro_batch",
        "rollout.max_total_tokens",
        "rollout.context_length",
    ):
        problems += check_limits(config, spec, longest)
    return problems


def _check_rows(config: RunConfig, key: str, path: Path) -> tuple[list[Row], list[ConfigProblem]]:
    result = read_rows(path, prompt_key=config.data.prompt_key, answer_key=config.data.answer_key, limit=_SHOWN)
    problems = [
        ConfigProblem(
            key=key,
            value=str(path) if problem.number is None else f"{path}:{problem.number}",
            message=problem.text,
        )
        for problem in result.problems
    ]
    if result.more_problems:
        problems.append(
            ConfigProblem(key=key, value=str(path), message=f"{result.more_problems} more rows with problems")
        )
    return result.rows, problems


def _check_enough(config: RunConfig, rows: int) -> Iterator[ConfigProblem]:
    wanted = config.grpo.prompts_per_iteration
    if rows < wanted:
        yield ConfigProblem(
            key="grpo.prompts_per_iteration",
            value=str(wanted),
            message=f"data.train has only {rows} rows, so an iteration sees some prompts more than once",
            suggestion=f"{rows} or fewer",
            severity="warning",
        )
