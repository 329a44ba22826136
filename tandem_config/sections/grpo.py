"""Settings of the algorithm: batch, advantages, loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem_config.sections.base import ListOf, NewTokens, PositiveFloat, PositiveInt, Section, Temperature, setting

# Bounded as in servicekit/rpc/request_bounds.py.
StopText = Annotated[str, Field(min_length=1, max_length=1024)]

# What a preset sets, unless the same source of settings (file, options) sets it.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "objective": "grpo", "baseline": "mean", "advantage_std": "group", "aggregation": "seq-mean-token-mean",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    "dr_grpo": {
        "objective": "grpo", "baseline": "mean", "advantage_std": "none", "aggregation": "dr-grpo",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    "dapo": {
        "objective": "grpo", "baseline": "mean", "advantage_std": "group", "aggregation": "token-mean",
        "clip_low": 0.2, "clip_high": 0.28, "zero_variance": "drop",
    },
    "gspo": {
        "objective": "gspo", "baseline": "mean", "advantage_std": "group", "aggregation": "seq-mean-token-mean",
        "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None,
    },
    # CISPO's paper gives no bound of the ratio; 5 is usual.
    "cispo": {
        "objective": "cispo", "baseline": "mean", "advantage_std": "group", "aggregation": "token-mean",
        "clip_low": 0.2, "clip_high": 4.0, "dual_clip": None,
    },
    "decoupled": {
        "objective": "grpo", "clip_low": 0.2, "clip_high": 0.2, "old_logprobs": "recompute",
        "correction": "importance", "correction_level": "token",
    },
}  # fmt: skip


class GrpoSection(Section):
    """The algorithm; definitions and sources in docs/numerics.md."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "decoupled"] | None = setting(
        None, "the defaults are no paper's: GRPO with token-mean"
    )
    """A published algorithm, by name: sets what docs/numerics.md lists for it, except settings that are given besides
    it. An option's preset replaces what a file sets."""
    prompts_per_iteration: int = setting(
        64, "with group_size, 1024 samples: advantages of small noise", "prompts", gt=0, le=2**23
    )
    """Prompts (groups) in an iteration."""
    group_size: int = setting(
        16, "the mean of 16 rewards is a baseline of a quarter of their spread", "completions", ge=2, le=2**16
    )
    """Completions per prompt; 1 would make every advantage 0."""
    updates_per_iteration: int = setting(
        4, "four steps from one rollout: the ratio stays within the clip", "updates", gt=0, le=2**20
    )
    """Optimizer updates in an epoch, each on an equal share of the groups' samples. More than 1 update in an iteration:
    a trainer rank keeps 12 bytes per parameter that it holds in (page-locked) host memory, to undo a step."""
    updates_divide: Literal["samples", "prompts"] = setting(
        "samples", "every update then has samples of nearly all prompts"
    )
    """What is divided among the updates, at random: samples, or prompts with all of their completions. With prompts
    trainer.share_prompts saves more: an update computes a prompt once for all of its group."""
    epochs: PositiveInt = setting(1, "each sample once: the policy leaves the one that sampled least", "epochs")
    """Passes over an iteration's samples, each with updates_per_iteration updates; from the second on in another order,
    drawn from run.seed and the number of train steps. pi_old stays that of the step's start."""
    max_new_tokens: NewTokens = setting(256, "short answers; reasoning needs thousands", "tokens")
    """Longest completion, in tokens."""
    temperature: Temperature = setting(1.0, "the policy itself is sampled, as the gradient assumes")
    """Sampling temperature; the trainer divides its logits by it too."""
    stop_token_ids: Annotated[ListOf[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=2**11)] = setting(
        (), "a model folder names its own ends"
    )
    """Tokens that end a completion, besides those of generation_config.json, config.json and the tokenizer."""
    stop: Annotated[ListOf[StopText], Field(max_length=32)] = setting((), "a trained model ends by itself")
    """Texts that end a completion, e.g. ['</answer>']. Their tokens are trained too; the last one may hold more text
    than the stop."""
    baseline: Literal["mean", "leave-one-out"] = setting(
        "mean", "as in the GRPO paper; the other is G / (G - 1) times as large before advantage_std"
    )
    """What a reward is compared with: the mean of its group, or of the others in it (RLOO)."""
    advantage_std: Literal["group", "batch", "none"] = setting(
        "group", "as in the GRPO paper; none avoids its bias towards easy and hard prompts"
    )
    """What centred rewards are divided by (unbiased std + 1e-6)."""
    zero_variance: Literal["keep", "drop", "replace"] = setting(
        "keep", "the batch keeps its size; such groups add only their entropy"
    )
    """Groups whose rewards are all equal: train on them (zero advantage), drop them, or (schedule.kind: async) train on
    another group in the place of each, also where only the scores of reward.accuracy are equal. Counted either way."""
    truncated: Literal["keep", "mask"] = setting(
        "keep", "as in the GRPO paper; mask if long completions are not worse ones"
    )
    """Completions cut off by max_new_tokens: train on them, or mask them after the group statistics."""
    objective: Literal["grpo", "gspo", "cispo"] = setting("grpo", "the one of the GRPO paper, of DAPO and of Dr. GRPO")
    """The policy term of the loss. grpo: each token's ratio is clipped; gspo: each sequence's; cispo: a token's ratio
    is a clipped weight on its log-prob. Others are presets."""
    clip_low: float = setting(0.2, "the usual value of PPO; gspo takes 3e-4", "ratio", gt=0, lt=1)
    """Ratio clip: lower bound is 1 - clip_low. Not read by objective: cispo."""
    clip_high: PositiveFloat = setting(0.2, "symmetric, as in PPO; DAPO takes 0.28, gspo 4e-4, cispo 4", "ratio")
    """Ratio clip: upper bound is 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = setting(
        None, "a correction that is rarely needed after one rollout", "ratio"
    )
    """Bound c of the dual clip for negative advantages; null: off. For objective: grpo."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = setting(
        "token-mean", "every token counts alike, long answers are not diluted"
    )
    """How token losses become one number; denominators are global over an optimizer update. dr-grpo: sum / (sequences x
    max_new_tokens)."""
    entropy_coefficient: float = setting(0.0, "a bonus changes the optimum; watch the entropy first", "factor")
    """Entropy bonus; entropy is always measured."""
    kl_coefficient: float = setting(0.0, "DAPO and Dr. GRPO go without; the GRPO paper takes 0.04", "factor", ge=0)
    """Weight of the divergence from a frozen reference policy; 0: no reference policy. A trainer rank keeps the
    reference's shard in host memory (2 or 4 bytes per parameter) and computes its log-probs itself."""
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", "never negative, of low variance, and the GRPO paper's; k1 is usual in the reward"
    )
    """KL(pi || pi_ref) of a token, with d = log pi_ref - log pi: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1."""
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "as in the GRPO paper; the reward costs another forward pass before the step"
    )
    """loss: the coefficient times each token's KL is added to its loss. reward: the coefficient times the sum of a
    completion's KL, at the iteration's start, is taken off its reward before the advantages."""
    reference_path: Path | None = setting(None, "the policy is kept near its start")
    """Model folder of the reference policy, of the policy's own sizes; null: model.path."""
    reference_refresh_every: PositiveInt | None = setting(
        None, "a frozen reference bounds the run as a whole, not the last steps", "train steps"
    )
    """Train steps after which the policy becomes the reference, again and again; null: never. With it checkpoints hold
    the reference too."""
    old_logprobs: Literal["recompute", "rollout"] = setting(
        "recompute", "exact whatever the engine's numerics; costs a forward pass"
    )
    """pi_old: recomputed by the trainer at a step's start, or taken from the engine (one forward less)."""
    correction: Literal["none", "importance", "tis", "icepop", "mis"] = setting(
        "none", "not needed while trainer and engine agree"
    )
    """Weights w = pi_old / pi_roll on the token losses, for what engine and trainer compute differently or a stale
    policy sampled. importance: w; tis: w, truncated to the bounds; icepop, mis: w within the bounds, else 0. Needs
    old_logprobs: recompute."""
    correction_level: Literal["token", "sequence", "geometric"] = setting(
        "token", "bounded variance; a product is exact, and far from 1 for long completions"
    )
    """What w is of: a token; a sequence, the product over its tokens; or geometric, the mean of that product per token.
    icepop: token."""
    correction_low: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None, "small weights do no harm; IcePop takes 0.5", "ratio"
    )
    """Lower bound of w; null: none. For tis, icepop (which needs it) and mis."""
    correction_high: Annotated[float, Field(ge=1)] | None = setting(
        None, "no default: 2 is usual for tokens, IcePop takes 5", "ratio"
    )
    """Upper bound of w; tis, icepop and mis need it."""
    on_non_finite: Literal["fail", "skip"] = setting("fail", "the first NaN is nearly always a mistake, not chance")
    """What a loss or gradient that is not finite does: fail undoes the step and ends the run; skip leaves that
    optimizer update out, counts it (skipped_updates) and continues until non_finite_budget is spent."""
    non_finite_budget: PositiveInt = setting(
        10, "a rare overflow in bfloat16 passes, a broken setting does not", "updates"
    )
    """Updates that on_non_finite: skip leaves out over the run, resumed or not; the next one fails."""
    logprob_diff_limit: PositiveFloat | None = setting(
        None, "float32 on both sides stays below it; in bfloat16 the largest of millions of tokens says nothing", "nats"
    )
    """|log pi_trainer - log pi_engine| after a sync above which there is a warning: of any token in float32, of more
    than one in a thousand in bfloat16, where a mean above 0.05 is one too. null: 1e-4 in float32, 0.5 in bfloat16."""
    logprob_diff_stop: PositiveFloat | None = setting(
        0.25, "rounding in bfloat16 is a tenth of it, a wrong rotary scaling many times it", "nats"
    )
    """Mean |log pi_trainer - log pi_engine| over an iteration's tokens above which the run ends, because the two do not
    compute the same model. null: never."""

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coefficient != 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards have a KL term."""
        return self.kl_coefficient != 0 and self.kl_in == "reward"

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        return given if not isinstance(given, Mapping) else {**preset_values(given.get("preset")), **given}


def preset_values(preset: object) -> Mapping[str, Any]:
    """Return what a preset sets; nothing if there is no such preset.

    >>> preset_values("decoupled")["correction"]
    'importance'
    """
    return PRESETS.get(preset, {}) if isinstance(preset, str) else {}
