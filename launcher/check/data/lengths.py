"""Checks that prompts are not too long, and fit with their completions into model, micro-batch and KV cache."""

from collections.abc import Iterator
from dataclasses import replace

from coordinator.data.scan import Scan
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import EvaluationSet, RunConfig
from weightsync.model.spec import ModelSpec


def check_lengths(config: RunConfig, scan: Scan, *, key: str) -> Iterator[ConfigProblem]:
    """Report prompts that are too long.

    Args:
        key: the part's key in the configuration.
    """
    if not scan.num_overlong:
        return
    row, length = scan.overlong[0]
    limit = config.data.max_prompt_tokens
    count = f"{scan.num_overlong.total()} of {scan.num_rows} prompts exceed data.max_prompt_tokens ({limit})"
    if len(scan.num_overlong) > 1:
        count += f" ({', '.join(f'{name}: {number}' for name, number in scan.num_overlong.items())})"
    place, message = f"{row.file}:{row.number}", f"{count}; the first has {length} tokens"
    if scan.num_used and config.data.overlong_prompts == "drop":
        yield problem(key, place, f"{message}; they are left out", severity="warning")
        return
    drop = ", or set data.overlong_prompts: drop" if scan.num_used else ": no prompt is left otherwise"
    yield problem(key, place, message, f"raise data.max_prompt_tokens to {scan.longest_overlong}{drop}")


# Keys that check_limits reads.
LIMITS = (
    "grpo.max_new_tokens",
    "trainer.max_tokens_per_micro_batch",
    "rollout.max_total_tokens",
    "rollout.context_length",
)


def check_limits(config: RunConfig, spec: ModelSpec | None, longest: int) -> Iterator[ConfigProblem]:
    """Check that the longest prompt and completion together fit the model, a micro-batch, the context and the KV cache.

    Args:
        longest: tokens of the longest prompt; 0 if the data could not be measured. Then the completion alone is
            checked, and only against the first two; tandem_config/cross_checks.py does so for the others.
    """
    new = config.grpo.max_new_tokens
    if spec is not None and longest + new > spec.max_positions:
        what = _longest_sequence(spec)
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
        "" if spec is None else _longest_sequence(spec): None if spec is None else spec.max_positions,
        "rollout.context_length": config.rollout.context_length,
        "rollout.max_total_tokens": config.rollout.max_total_tokens,
    }
    for what, limit in limits.items():
        if limit is not None and longest + new > limit:
            yield problem(
                "evaluation.sets",
                sampled.name,
                f"its longest prompt ({longest} tokens) and {new} new tokens exceed {what} ({limit} tokens)",
                f"give the set max_new_tokens of at most {limit - longest}"
                if limit > longest
                else "lower data.max_prompt_tokens",
            )


def _longest_sequence(spec: ModelSpec) -> str:
    if spec.rope_scaling is None:
        return "the model's max_position_embeddings"
    return f"the model's longest sequence with its {spec.rope_scaling.kind} rotary scaling"


def _too_long(key: str, value: int, what: str, limit: int, longest: int, new: int) -> ConfigProblem:
    room = limit - longest
    return problem(
        key,
        value,
        f"the longest prompt ({longest} tokens) and grpo.max_new_tokens ({new}) exceed {what} ({limit} tokens)",
        f"set grpo.max_new_tokens to at most {room}" if room > 0 else "lower data.max_prompt_tokens",
    )
