"""Checks of the algorithm: batch, lengths, numerical limits."""

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration")
def _updates_divide_samples(config: RunConfig) -> Problems:
    grpo = config.grpo
    samples = grpo.prompts_per_iteration * grpo.group_size
    if samples % grpo.updates_per_iteration != 0:
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        yield problem(
            "grpo.updates_per_iteration",
            grpo.updates_per_iteration,
            f"does not divide the {samples} samples of an iteration "
            f"({grpo.prompts_per_iteration} prompts x {grpo.group_size} completions)",
            f"nearest that does: {min(fits, key=lambda n: abs(n - grpo.updates_per_iteration))}",
        )


@check("grpo.updates_divide", "grpo.prompts_per_iteration", "grpo.updates_per_iteration")
def _updates_divide_prompts(config: RunConfig) -> Problems:
    grpo = config.grpo
    if grpo.updates_divide != "samples" and grpo.prompts_per_iteration % grpo.updates_per_iteration != 0:
        yield problem(
            "grpo.updates_divide",
            "prompts",
            f"but grpo.updates_per_iteration {grpo.updates_per_iteration} does not divide the "
            f"{grpo.prompts_per_iteration} prompts of an iteration",
            "change grpo.prompts_per_iteration or grpo.updates_per_iteration, or set grpo.updates_divide: samples",
        )


@check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration", "trainer.data_parallel")
def _data_parallel_has_samples(config: RunConfig) -> Problems:
    grpo, copies = config.grpo, config.trainer.data_parallel
    samples = grpo.prompts_per_iteration * grpo.group_size // grpo.updates_per_iteration
    if samples < copies:
        yield problem(
            "trainer.data_parallel",
            copies,
            f"exceeds the {samples} samples of an update: some copies of the model would have none",
            "raise grpo.prompts_per_iteration, or lower grpo.updates_per_iteration or trainer.data_parallel",
        )


@check("grpo.max_new_tokens", "rollout.context_length")
def _context_holds_a_completion(config: RunConfig) -> Problems:
    limit = config.rollout.context_length
    if limit is not None and config.grpo.max_new_tokens >= limit:
        yield problem(
            "grpo.max_new_tokens",
            config.grpo.max_new_tokens,
            f"leaves no room for a prompt in rollout.context_length ({limit})",
            "raise rollout.context_length or lower grpo.max_new_tokens",
        )


@check("grpo.max_new_tokens", "rollout.max_total_tokens")
def _cache_holds_a_completion(config: RunConfig) -> Problems:
    limit = config.rollout.max_total_tokens
    if limit is not None and config.grpo.max_new_tokens >= limit:
        yield problem(
            "rollout.max_total_tokens",
            limit,
            f"the KV cache is too small for one completion of grpo.max_new_tokens ({config.grpo.max_new_tokens})",
            f"at least prompt + completion; {2 * config.grpo.max_new_tokens} or more",
        )


@check("model.dtype", "sync.dtype", "grpo.logprob_diff_limit")
def _limit_suits_dtype(config: RunConfig) -> Problems:
    limit = config.grpo.logprob_diff_limit
    # Up to 0.2, which older releases recommended for the largest difference.
    if limit is not None and limit <= 0.2 and "bfloat16" in (config.model.dtype, config.sync.dtype):
        yield problem(
            "grpo.logprob_diff_limit",
            limit,
            "is little for bfloat16: more than one token in a thousand may exceed it in every healthy iteration",
            "leave it out: 0.5 for all but one token in a thousand, and 0.05 for the mean",
            severity="warning",
        )
