"""Checks the data files row by row."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.check.data.answers import check_answers
from launcher.check.data.lengths import check_lengths, check_limits, check_set
from launcher.check.data.template import check_template
from tandem_config.problems import ConfigProblem
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_files.data_rows import Row, read_rows
from tandem_files.tokenizer import TextCodec
from weightsync.model.spec import ModelSpec

# Problems of one file that are listed; the rest is counted.
_SHOWN = 10


def check_data(
    config: RunConfig, usable: Callable[..., bool], spec: ModelSpec | None, codec: TextCodec | None
) -> list[ConfigProblem]:
    """Check the rows of the training data and of all evaluation sets, their answers, chat template and lengths.

    Args:
        usable: whether all of the given keys have valid values.
        spec: the model, for its position limit; None: not checked.
        codec: the tokenizer, for lengths in tokens; None: not checked.
    """
    problems: list[ConfigProblem] = []
    reward_problems = list(_check_reward(config.reward.kind)) if usable("reward.kind") else []
    longest = 0
    for key, path, sampled in _files(config):
        if not usable(key, "data.prompt_key", "data.answer_key"):
            continue
        rows, found = _check_rows(config, key, path)
        problems += found
        if (
            config.reward.kind == "math_verify"
            and not reward_problems
            and usable("reward.kind", "reward.workers", "reward.timeout_s")
        ):
            problems += check_answers(config, path, rows, key=key)
        if usable("model.path", "model.tokenizer_path"):
            problems += check_template(config, rows, key=key)
        if key == "data.train" and rows and usable("grpo.prompts_per_iteration"):
            problems += _check_enough(config, len(rows))
        if codec is not None and usable("data.max_prompt_tokens", "data.overlong_prompts"):
            length, found = check_lengths(config, path, rows, codec, key=key)
            problems += found
            if sampled is None:
                longest = max(longest, length)
            elif usable("grpo.max_new_tokens", "rollout.max_total_tokens", "rollout.context_length"):
                problems += check_set(config, sampled, spec, length)
    if usable(
        "grpo.max_new_tokens",
        "trainer.max_tokens_per_micro_batch",
        "rollout.max_total_tokens",
        "rollout.context_length",
    ):
        problems += check_limits(config, spec, longest)
    return problems + reward_problems


def _files(config: RunConfig) -> Iterator[tuple[str, Path, EvaluationSet | None]]:
    """Yield the key and path of each data file, with the set that it is of."""
    yield "data.train", config.data.train, None
    if config.data.heldout is not None:
        yield "data.heldout", config.data.heldout, None
    for sampled in config.evaluation.sets:
        yield "evaluation.sets", sampled.data, sampled


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


def _check_reward(kind: str) -> Iterator[ConfigProblem]:
    if kind == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield ConfigProblem(
            key="reward.kind",
            value=kind,
            message="the package math-verify is not installed",
            suggestion="pip install math-verify",
        )
