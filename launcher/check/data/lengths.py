"""Checks that prompts have tokens, and that prompts and completions fit into model, micro-batch and KV cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tandem_config.problems import ConfigProblem
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_files.data_rows import Row
from tandem_files.tokenizer import TextCodec
from weightsync.model.spec import ModelSpec

# Rows tokenized in one batch: bounds memory, keeps the tokenizer's threads busy.
_ENCODE_BATCH = 4096


def check_lengths(
    config: RunConfig, path: Path, rows: Sequence[Row], codec: TextCodec, *, key: str
) -> tuple[int, list[ConfigProblem]]:
    """Measure the prompts in tokens and report those that are empty or too long.

    Args:
        path: data file that the rows are from.
        key: the file's key in the configuration.
    Returns: tokens of the longest prompt that will be used (0 if there is none), and the problems.
    """
    limit = config.data.max_prompt_tokens
    try:
        measured = list(zip((row.number for row in rows), _token_counts(rows, codec), strict=True))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception for text that it cannot handle
        return 0, [_refused(key, path, error)]
    empty = [line for line, length in measured if length == 0]
    over = [(line, length) for line, length in measured if length > limit]
    longest = max((length for _, length in measured if length <= limit), default=0)
    problems = [_no_tokens(key, path, empty)] if empty else []
    if over:
        drop = config.data.overlong_prompts == "drop"
        everything = len(over) == len(measured)
        if drop and not everything:
            problems.append(_dropped(key, path, over, num_rows=len(measured), limit=limit))
        else:
            problems.append(_overlong(key, path, over, num_rows=len(measured), limit=limit, may_drop=not everything))
    return longest, problems


def check_limits(config: RunConfig, spec: ModelSpec | None, longest: int) -> Iterator[ConfigProblem]:
    """Check that the longest prompt and completion together fit the model, a micro-batch, the context and the KV cache.

    Args:
        longest: tokens of the longest prompt; 0 if the data could not be measured. Then the completion alone is
            checked, and only against the first two; tandem_config/cross_checks.py does so for the others.
    """
    new = config.grpo.max_new_tokens
    if spec is not None and longest + new > spec.max_positions:
        what = "the model's max_position_embeddings"
        yield _too_long("grpo.max_new_tokens", new, what, spec.max_positions, longest, new)
    fits = config.trainer.max_tokens_per_micro_batch
    if longest + new > fits:
        problem = _too_long("trainer.max_tokens_per_micro_batch", fits, "a micro-batch", fits, longest, new)
        yield replace(problem, suggestion=f"raise it to at least {longest + new}")
    if longest == 0:
        return
    for key, limit in (
        ("rollout.context_length", config.rollout.context_length),
        ("rollout.max_total_tokens", config.rollout.max_total_tokens),
    ):
        if limit is not None and longest + new > limit:
            what = "the KV cache" if key == "rollout.max_total_tokens" else key
            yield _too_long(key, limit, what, limit, longest, new)


def check_set(
    config: RunConfig, sampled: EvaluationSet, spec: ModelSpec | None, longest: int
) -> Iterator[ConfigProblem]:
    """Check that the longest prompt of a set and a completion fit the model, the context and the KV cache.

    Args:
        longest: tokens of the set's longest prompt.
    """
    new = config.grpo.max_new_tokens if sampled.max_new_tokens is None else sampled.max_new_tokens
    limits = {
        "the model's max_position_embeddings": None if spec is None else spec.max_positions,
        "rollout.context_length": config.rollout.context_length,
        "rollout.max_total_tokens": config.rollout.max_total_tokens,
    }
    for what, limit in limits.items():
        if limit is not None and longest + new > limit:
            yield ConfigProblem(
                key="evaluation.sets",
                value=sampled.name,
                message=f"its longest prompt ({longest} tokens) and {new} new tokens exceed {what} ({limit} tokens)",
                suggestion=f"give the set max_new_tokens of at most {limit - longest}"
                if limit > longest
                else "lower data.max_prompt_tokens",
            )


def _token_counts(rows: Sequence[Row], codec: TextCodec) -> Iterator[int]:
    for start in range(0, len(rows), _ENCODE_BATCH):
        for ids in codec.encode([row.prompt for row in rows[start : start + _ENCODE_BATCH]]):
            yield len(ids)


def _refused(key: str, path: Path, error: Exception) -> ConfigProblem:
    message = f"the tokenizer fails on a prompt: {error}"
    return ConfigProblem(key=key, value=str(path), message=message, suggestion="is it the tokenizer for this text?")


def _no_tokens(key: str, path: Path, lines: list[int]) -> ConfigProblem:
    return ConfigProblem(
        key=key,
        value=f"{path}:{lines[0]}",
        message=f"the tokenizer makes no token of this prompt ({len(lines)} such prompts in all)",
        suggestion="is it the tokenizer for this text?",
    )


def _overlong(
    key: str, path: Path, over: list[tuple[int, int]], *, num_rows: int, limit: int, may_drop: bool
) -> ConfigProblem:
    """Report too long prompts; `may_drop`: other prompts remain if these are dropped."""
    longest = max(length for _, length in over)
    return ConfigProblem(
        key=key,
        value=f"{path}:{over[0][0]}",
        message=_how_many(over, num_rows, limit),
        suggestion=f"raise data.max_prompt_tokens to {longest}"
        + (", or set data.overlong_prompts: drop" if may_drop else ": no prompt is left otherwise"),
    )


def _dropped(key: str, path: Path, over: list[tuple[int, int]], *, num_rows: int, limit: int) -> ConfigProblem:
    return ConfigProblem(
        key=key,
        value=f"{path}:{over[0][0]}",
        message=f"{_how_many(over, num_rows, limit)}; they are left out",
        severity="warning",
    )


def _how_many(over: list[tuple[int, int]], num_rows: int, limit: int) -> str:
    count = f"{len(over)} of {num_rows} prompts exceed data.max_prompt_tokens ({limit})"
    return f"{count}; the first has {over[0][1]} tokens"


def _too_long(key: str, value: int, what: str, limit: int, longest: int, new: int) -> ConfigProblem:
    room = limit - longest
    return ConfigProblem(
        key=key,
        value=str(value),
        message=f"the longest prompt ({longest} tokens) and grpo.max_new_tokens ({new}) exceed {what} ({limit} tokens)",
        suggestion=f"set grpo.max_new_tokens to at most {room}" if room > 0 else "lower data.max_prompt_tokens",
    )
