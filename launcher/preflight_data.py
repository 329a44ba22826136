"""Checks the data files row by row, and that prompts and completions fit into model and KV cache."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from coordinator.rows import Row, read_rows
from coordinator.tokenizer import TextCodec
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from weightsync.model_spec import ModelSpec

_ENCODE_BATCH = 4096
# Lines of one file that are shown; the rest is counted.
_SHOWN = 10


def check_data(
    config: RunConfig, usable: Callable[..., bool], spec: ModelSpec | None, codec: TextCodec | None
) -> list[ConfigProblem]:
    """Problems of the rows; with a tokenizer also of their lengths, with a model also of its limits."""
    problems: list[ConfigProblem] = []
    longest = 0
    for part in ("train", "heldout"):
        path = config.data.train if part == "train" else config.data.heldout
        if path is None or not usable(f"data.{part}", "data.prompt_key", "data.answer_key"):
            continue
        rows, found = _check_rows(config, f"data.{part}", path)
        problems += found
        if part == "train" and rows and usable("grpo.prompts_per_iteration"):
            problems += _check_enough(config, len(rows))
        if codec is not None and usable("data.max_prompt_tokens", "data.overlong_prompts"):
            length, found = _check_lengths(config, f"data.{part}", path, rows, codec)
            longest = max(longest, length)
            problems += found
    if usable("grpo.max_new_tokens", "rollout.max_total_tokens", "rollout.context_length"):
        problems += _check_limits(config, spec, longest)
    if usable("reward.kind"):
        problems += _check_reward(config.reward.kind)
    return problems


def _check_rows(config: RunConfig, key: str, path: Path) -> tuple[list[Row], list[ConfigProblem]]:
    result = read_rows(path, prompt_key=config.data.prompt_key, answer_key=config.data.answer_key, limit=_SHOWN)
    problems = [
        ConfigProblem(
            key=key,
            value=str(path) if problem.number is None else f"{path}:{problem.number}",
            message=problem.message,
        )
        for problem in result.problems
    ]
    if result.more_problems:
        problems.append(
            ConfigProblem(key=key, value=str(path), message=f"{result.more_problems} more rows with problems")
        )
    return result.rows, problems


def _check_lengths(
    config: RunConfig, key: str, path: Path, rows: list[Row], codec: TextCodec
) -> tuple[int, list[ConfigProblem]]:
    """The longest prompt that will be used, in tokens; over-long ones by the policy of data.overlong_prompts."""
    limit, drop = config.data.max_prompt_tokens, config.data.overlong_prompts == "drop"
    lengths = [
        len(ids)
        for start in range(0, len(rows), _ENCODE_BATCH)
        for ids in codec.encode([row.prompt for row in rows[start : start + _ENCODE_BATCH]])
    ]
    over = [(row.number, length) for row, length in zip(rows, lengths, strict=True) if length > limit]
    longest = max((length for length in lengths if length <= limit), default=0)
    if not over:
        return longest, []
    line, length = over[0]
    everything = len(over) == len(rows)
    message = (
        f"{len(over)} of {len(rows)} prompts exceed data.max_prompt_tokens ({limit}); the first has {length} tokens"
    )
    return longest, [
        ConfigProblem(
            key=key,
            value=f"{path}:{line}",
            message=f"{message}; they are left out" if drop and not everything else message,
            suggestion=""
            if drop and not everything
            else f"raise it to {max(lengths)}" + ("" if drop else ", or set data.overlong_prompts: drop"),
            severity="warning" if drop and not everything else "error",
        )
    ]


def _check_limits(config: RunConfig, spec: ModelSpec | None, longest: int) -> Iterator[ConfigProblem]:
    """`longest` is 0 if the data could not be measured; a completion alone can still be too long for the model.

    For the other two limits the cross checks of the configuration have looked at that case already.
    """
    new = config.grpo.max_new_tokens
    if spec is not None and longest + new > spec.max_positions:
        yield _too_long(
            "grpo.max_new_tokens", new, "the model's max_position_embeddings", spec.max_positions, longest, new
        )
    if longest == 0:
        return
    for key, limit in (
        ("rollout.context_length", config.rollout.context_length),
        ("rollout.max_total_tokens", config.rollout.max_total_tokens),
    ):
        if limit is not None and longest + new > limit:
            what = "the KV cache" if key == "rollout.max_total_tokens" else key
            yield _too_long(key, limit, what, limit, longest, new)


def _too_long(key: str, value: int, what: str, limit: int, longest: int, new: int) -> ConfigProblem:
    room = limit - longest
    return ConfigProblem(
        key=key,
        value=str(value),
        message=f"the longest prompt ({longest} tokens) and grpo.max_new_tokens ({new}) exceed {what} ({limit} tokens)",
        suggestion=f"set grpo.max_new_tokens to at most {room}" if room > 0 else "lower data.max_prompt_tokens",
    )


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


def _check_reward(kind: Literal["exact_match", "regex", "math_verify"]) -> Iterator[ConfigProblem]:
    if kind == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield ConfigProblem(
            key="reward.kind",
            value=kind,
            message="the package math-verify is not installed",
            suggestion="pip install math-verify",
        )
