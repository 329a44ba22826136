"""The steps of a GRPO iteration, one function each; a schedule (schedule/sync.py) says which one runs when.

A step takes data and returns data; it keeps nothing. Steps are numbered as in ARCHITECTURE.md: 2 is
generate/dispatch.py, 4 is learn/scoring.py, 3 and 9 run in the rollout services. Legend: P prompts, G completions per
prompt, S samples, T completion tokens of all samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coordinator.data.cursor import DataCursor
from coordinator.learn.advantages import group_advantages, zero_variance
from coordinator.learn.kl import diverge
from coordinator.learn.updates import make_batch, select_samples, stale_samples, without_tokens_before
from servicekit.errors import WrongVersion, in_part
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import (
    AdvantageResult,
    Divergence,
    Generation,
    Group,
    GroupScores,
    Prompt,
    TrainBatch,
    policy_tokens,
)
from tandem_clients.trainer import Learner
from tandem_config.schema import GrpoSection


def take_prompts(cursor: DataCursor, num_prompts: int, wave: int) -> dict[str, Prompt]:
    """Step 1: take the next P prompts, by group id: wave, place and data row, as in `i12.g3.row77`."""
    with in_part("data"):
        prompts = cursor.take(num_prompts)
    return {f"i{wave}.g{place}.{prompt.name}": prompt for place, prompt in enumerate(prompts)}


def check_staleness(generation: Generation, policy_version: int, max_staleness: int) -> None:
    """Check the age of all samples. Raises: WrongVersion: one is too old for a step of `policy_version`."""
    stale = stale_samples(generation.groups, policy_version, max_staleness)
    if stale:
        raise WrongVersion(f"{len(stale)} samples are older than version {policy_version}; the first is {stale[0]}")


async def measure_mismatch(trainer: Learner, groups: Sequence[Group]) -> dict[str, float]:
    """Measure |log pi_trainer - log pi_engine| on tokens of the trainer's present policy; in nats."""
    shape = (len(groups), len(groups[0].completions))
    samples = select_samples(groups, np.zeros(shape), np.zeros(shape[0], np.bool_), truncated="keep")
    counts_T = np.frombuffer(policy_tokens(samples), np.uint8).astype(np.bool_)
    engine_T = np.concatenate([np.asarray(sample.completion.logprobs, np.float32) for sample in samples])[counts_T]
    differences = np.abs((await trainer.logprobs(samples))[counts_T] - engine_T)
    known = differences[np.isfinite(engine_T)]
    figures = {"mean": known.mean(), "p999": np.quantile(known, 0.999), "max": known.max()} if known.size else {}
    return {f"logprob_abs_diff_{name}": float(value) for name, value in figures.items()} | {
        "engine_logprobs_not_finite": float(engine_T.size - known.size),
        "tokens": float(engine_T.size),
    }


async def measure_divergence(
    grpo: GrpoSection, trainer: Learner, generation: Generation, scored: GroupScores
) -> Divergence | None:
    """Step 5 with KL in the reward: measure how far completions are from the reference policy; None: there is none."""
    present_PG = scored.present_PG
    samples = select_samples(
        generation.groups,
        np.zeros(present_PG.shape),
        np.zeros(len(present_PG), np.bool_),
        truncated="keep",
        missing_PG=~present_PG,
    )
    if not samples:
        return None
    watch = Stopwatch()
    reference_T = await trainer.logprobs(samples, reference=True)
    if grpo.old_logprobs == "recompute":
        old_T = await trainer.logprobs(samples)
    else:
        old_T = np.concatenate([np.asarray(sample.completion.logprobs, np.float32) for sample in samples])
        # A token without a log-prob of the engine is taken to be as likely as under the reference.
        old_T = np.where(np.isfinite(old_T), old_T, reference_T)
    return diverge(samples, present_PG, old_T, reference_T, grpo, watch.total_s())


def compute_advantages(grpo: GrpoSection, scored: GroupScores, divergence: Divergence | None = None) -> AdvantageResult:
    """Step 5: compute the advantages, and which groups have none or are dropped.

    Args:
        divergence: what is taken off the rewards first; None: nothing.
    """
    penalties_PG = 0.0 if divergence is None else divergence.penalties_PG
    zero_variance_P = zero_variance(scored.rewards_PG, scored.missing_PG)
    return AdvantageResult(
        advantages_PG=group_advantages(
            scored.rewards_PG - penalties_PG,
            std=grpo.advantage_std,
            baseline=grpo.baseline,
            missing_PG=scored.missing_PG,
        ),
        missing_PG=scored.missing_PG,
        zero_variance_P=zero_variance_P,
        dropped_P=left_out(grpo, scored),
    )


def left_out(grpo: GrpoSection, scored: GroupScores) -> NDArray[np.bool_]:
    """Return which groups are not trained on because of their rewards: [P].

    With `replace` the reward of reward.accuracy decides too: in a group of wrong answers others may differ.
    """
    equal_P = zero_variance(scored.rewards_PG, scored.missing_PG)
    if grpo.zero_variance == "replace":
        equal_P |= zero_variance(np.nan_to_num(scored.scores_PG), scored.missing_PG)
    return equal_P if grpo.zero_variance != "keep" else np.zeros_like(equal_P)


def leave_out_old(
    generation: Generation, result: AdvantageResult, oldest: int, *, whole: bool
) -> tuple[Generation, AdvantageResult]:
    """Leave out of training what was sampled by policies before version `oldest`; advantages stay as they are.

    Args:
        whole: leave out completions with such tokens; else mask the tokens, and leave out completions of nothing else.
    """
    if all(one.oldest_version >= oldest for group in generation.groups for one in group.completions):
        return generation, result
    old_PG = np.zeros(result.advantages_PG.shape, np.bool_)
    groups = []
    for place, group in enumerate(generation.groups):
        completions = [without_tokens_before(completion, oldest) for completion in group.completions]
        for index, (before, after) in enumerate(zip(group.completions, completions, strict=True)):
            old_PG[place, index] = before is not after if whole else not after.num_sampled
        groups.append(replace(group, completions=tuple(completions)))
    return replace(generation, groups=tuple(groups)), replace(result, old_PG=old_PG)


def build_batch(
    grpo: GrpoSection,
    generation: Generation,
    result: AdvantageResult,
    *,
    step_id: str,
    policy_version: int,
    rng: np.random.Generator,
) -> TrainBatch | None:
    """Step 6: build the train step's batch; None if no sample is left."""
    samples = select_samples(
        generation.groups,
        result.advantages_PG,
        result.dropped_P,
        truncated=grpo.truncated,
        missing_PG=result.left_out_PG,
    )
    if not samples:
        return None
    return make_batch(
        samples,
        step_id=step_id,
        policy_version=policy_version,
        num_updates=grpo.updates_per_iteration,
        divide=grpo.updates_divide,
        rng=rng,
    )
