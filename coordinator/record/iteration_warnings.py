"""Warnings about a single iteration."""

from collections.abc import Iterator, Mapping

from coordinator.record.health import mismatches
from servicekit.errors import Internal
from tandem_clients.flow import GroupScores, IterationRecord

# Rows whose answers cannot be read that one warning names.
_NAMED_ROWS = 5
# Most characters of the reasons why calls failed; the log has all of them.
_CHARACTERS = 300


# Tokens without a log-prob of the engine that is a number: a few are chance, in bfloat16; many hide another model.
MAX_UNKNOWN_SHARE = 0.1


def check_same_model(record: IterationRecord, stop_at: float | None) -> None:
    """Check that trainer and engine compute the same model.

    Args:
        stop_at: grpo.logprob_diff_stop; None: no limit.
    Raises: Internal: their mean difference is larger, or too many tokens cannot be compared.
    """
    metrics = record.mismatch or ({} if record.step is None else record.step.metrics)
    unknown, tokens = metrics.get("engine_logprobs_not_finite", 0.0), metrics.get("tokens", 0.0)
    if stop_at is not None and unknown > MAX_UNKNOWN_SHARE * tokens:
        raise Internal(
            f"iteration {record.iteration}: the engine gave no finite log-prob for {unknown:.0f} of {tokens:.0f} "
            f"tokens, more than {MAX_UNKNOWN_SHARE:.0%}, so that nothing of the iteration is kept: see the replicas' "
            "logs, model.dtype and the model's weights; grpo.logprob_diff_stop: null continues nevertheless"
        )
    mean = record.mismatch.get("logprob_abs_diff_mean")
    # NaN does not pass either.
    if stop_at is None or mean is None or mean <= stop_at:
        return
    raise Internal(
        f"iteration {record.iteration}: the log-probs of trainer and engine differ by {mean:.3g} nats on average over "
        f"all tokens (at most {metrics.get('logprob_abs_diff_max', mean):.3g}), more than grpo.logprob_diff_stop = "
        f"{stop_at:g}: they do not compute the same model, so nothing of the iteration is kept. Look at config.json in "
        "model.path (rope_parameters, rope_scaling, rope_theta, hidden_act, tie_word_embeddings, quantization), then "
        "at model.dtype, sync.dtype, grpo.temperature and the parallel sizes; docs/runbook.md, TandemLogprobMismatch"
    )


def remarks(record: IterationRecord, limits: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) of each warning, except those about scores. limits: health.logprob_limits."""
    for message in mismatches(record.mismatch, limits) if record.mismatch else ():
        yield "logprob_difference", f"iteration {record.iteration}: {message}; see grpo.logprob_diff_limit"
    skipped = 0 if record.step is None else int(record.step.metrics.get("skipped_updates", 0))
    if skipped:
        yield (
            "skipped_update",
            f"iteration {record.iteration}: {skipped} optimizer updates were left out, because a loss or gradient was "
            "not finite (the trainer's log names the samples); grpo.non_finite_budget bounds how many may be",
        )
    if record.step is None:
        yield "nothing_to_train", f"iteration {record.iteration}: no sample was left to train on, no train step"
    if record.generation.retried_calls:
        number, why = record.generation.retried_calls, "; ".join(record.generation.call_errors)[:_CHARACTERS]
        calls = "1 generate call" if number == 1 else f"{number} generate calls"
        yield "generate_retry", f"{calls} failed, and what was left continued: {why or 'see the log'}"


def score_remarks(where: str, scored: GroupScores, known_rows: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) of each warning about the scores of a batch.

    Args:
        where: whose prompts they are of: `data.train`.
        known_rows: places of its rows, and other matters, that have been warned about; new ones are added.
    """
    for about, message in scored.remarks.items():
        if about not in known_rows:
            known_rows.add(about)
            yield "reward_remark", f"{where}: {message}"
    if scored.num_errors:
        yield (
            "reward_error",
            f"{where}: scoring failed for {scored.num_errors} completions, "
            + ("which are left out" if scored.num_missing else "which score 0")
            + f"; first: {scored.first_error}",
        )
    if scored.num_timeouts:
        yield (
            "reward_timeout",
            f"{where}: scoring took longer than reward.timeout_s for {scored.num_timeouts} completions, "
            + ("which are left out" if scored.num_missing else "which count as wrong"),
        )
    new = [place for place in scored.unreadable_rows if place not in known_rows]
    if new:
        known_rows.update(new)
        named = ", ".join(new[:_NAMED_ROWS]) + (", ..." if len(new) > _NAMED_ROWS else "")
        yield (
            "unreadable_answer",
            f"{where}, {named}: the answer {scored.unreadable_rows[new[0]]}, so every completion scores 0 "
            "(`tandem check` lists such rows)",
        )
