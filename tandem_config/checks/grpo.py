"""Checks of the algorithm: batch, lengths, numerical limits."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig


@check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration")
def _updates_divide_samples(config: RunConfig) -> ConfigProblem | None:
    grpo = config.grpo
    samples = grpo.prompts_per_iteration * grpo.group_size
    if samples % grpo.updates_per_iteration == 0:
        return None
    fits = [n for n in range(1, samples + 1) if samples % n == 0]
    nearest = min(fits, key=lambda n: abs(n - grpo.updates_per_iteration))
    return problem(
        "grpo.updates_per_iteration",
        grpo.updates_per_iteration,
        f"does not divide the {samples} samples of an iteration "
        f"({grpo.prompts_per_iteration} prompts x {grpo.group_size} completions)",
        f"nearest that does: {nearest}",
    )


@check("grpo.updates_divide", "grpo.prompts_per_iteration", "grpo.updates_per_iteration")
def _updates_divide_prompts(config: RunConfig) -> ConfigProblem | None:
    grpo = config.grpo
    if grpo.updates_divide == "samples" or grpo.prompts_per_iteration % grpo.updates_per_iteration == 0:
        return None
    return problem(
        "grpo.updates_divide",
        "prompts",
        f"but grpo.updates_per_iteration {grpo.updates_per_iteration} does not divide the "
        f"{grpo.prompts_per_iteration} prompts of an iteration",
        "change grpo.prompts_per_iteration or grpo.updates_per_iteration, or set grpo.updates_divide: samples",
    )


@check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration", "trainer.data_parallel")
def _data_parallel_has_samples(config: RunConfig) -> ConfigProblem | None:
    grpo, copies = config.grpo, config.trainer.data_parallel
    samples = grpo.prompts_per_iteration * grpo.group_size // grpo.updates_per_iteration
    if samples >= copies:
        return None
    return problem(
        "trainer.data_parallel",
        copies,
        f"exceeds the {samples} samples of an update: some copies of the model would have none",
        "raise grpo.prompts_per_iteration, or lower grpo.updates_per_iteration or trainer.data_parallel",
    )


@check("grpo.max_new_tokens", "rollout.context_length")
def _context_holds_a_completion(config: RunConfig) -> ConfigProblem | None:
    limit = config.rollout.context_length
    if limit is None or config.grpo.max_new_tokens < limit:
        return None
    return problem(
        "grpo.max_new_tokens",
        config.grpo.max_new_tokens,
        f"leaves no room for a prompt in rollout.context_length ({limit})",
        "raise rollout.context_length or lower grpo.max_new_tokens",
    )


@check("grpo.max_new_tokens", "rollout.max_total_tokens")
def _cache_holds_a_completion(config: RunConfig) -> ConfigProblem | None:
    limit = config.rollout.max_total_tokens
    if limit is None or config.grpo.max_new_tokens < limit:
        return None
    return problem(
        "rollout.max_total_tokens",
        limit,
        f"the KV cache is too small for one completion of grpo.max_new_tokens ({config.grpo.max_new_tokens})",
        f"at least prompt + completion; {2 * config.grpo.max_new_tokens} or more",
    )


@check("model.dtype", "sync.dtype", "grpo.logprob_diff_limit")
def _limit_suits_dtype(config: RunConfig) -> ConfigProblem | None:
    limit = config.grpo.logprob_diff_limit
    # Up to 0.2, which older releases recommended for the largest difference.
    if "bfloat16" not in (config.model.dtype, config.sync.dtype) or limit is None or limit > 0.2:
        return None
    return problem(
        "grpo.logprob_diff_limit",
        limit,
        "is little for bfloat16: more than one token in a thousand may exceed it in every healthy iteration",
        "leave it out: 0.5 for all but one token in a thousand, and 0.05 for the mean",
        severity="warning",
    )
