"""Settings of the algorithm: batch, advantages, loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem_config.sections.base import (
    ListOf,
    NewTokens,
    PositiveFloat,
    PositiveInt,
    Section,
    Temperature,
    about,
)

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

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "decoupled"] | None = Field(
        None,
        description="A published algorithm, by name: sets what docs/numerics.md lists for it, except settings that are "
        "given beside it. An option's preset replaces what a file sets.",
        json_schema_extra=about("the defaults are no paper's: GRPO with token-mean"),
    )
    prompts_per_iteration: Annotated[int, Field(gt=0, le=2**23)] = Field(
        64,
        description="Prompts (groups) in an iteration.",
        json_schema_extra=about("with group_size, 1024 samples: advantages of small noise", unit="prompts"),
    )
    group_size: Annotated[int, Field(ge=2, le=2**16)] = Field(
        16,
        description="Completions per prompt; 1 would make every advantage 0.",
        json_schema_extra=about(
            "the mean of 16 rewards is a baseline of a quarter of their spread", unit="completions"
        ),
    )
    updates_per_iteration: Annotated[int, Field(gt=0, le=2**20)] = Field(
        4,
        description="Optimizer updates in an epoch, each on an equal share of the groups' samples. More than 1 update "
        "in an iteration: a trainer rank keeps 12 bytes per parameter that it holds in (page-locked) host memory, to "
        "undo a step.",
        json_schema_extra=about("four steps from one rollout: the ratio stays within the clip", unit="updates"),
    )
    updates_divide: Literal["samples", "prompts"] = Field(
        "samples",
        description="What is divided among the updates, at random: samples, or prompts with all of their completions. "
        "With prompts trainer.share_prompts saves more: an update computes a prompt once for all of its group.",
        json_schema_extra=about("every update then has samples of nearly all prompts"),
    )
    epochs: PositiveInt = Field(
        1,
        description="Passes over an iteration's samples, each with updates_per_iteration updates; from the second on "
        "in another order, drawn from run.seed and the number of train steps. pi_old stays that of the step's start.",
        json_schema_extra=about("each sample once: the policy leaves the one that sampled least", unit="epochs"),
    )
    max_new_tokens: NewTokens = Field(
        256,
        description="Longest completion, in tokens.",
        json_schema_extra=about("short answers; reasoning needs thousands", unit="tokens"),
    )
    temperature: Temperature = Field(
        1.0,
        description="Sampling temperature; the trainer divides its logits by it too.",
        json_schema_extra=about("the policy itself is sampled, as the gradient assumes"),
    )
    stop_token_ids: Annotated[ListOf[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=2**11)] = Field(
        (),
        description=(
            "Tokens that end a completion, beside those of generation_config.json, config.json and the tokenizer."
        ),
        json_schema_extra=about("a model folder names its own ends"),
    )
    stop: Annotated[ListOf[StopText], Field(max_length=32)] = Field(
        (),
        description=(
            "Texts that end a completion, e.g. ['</answer>']. Their tokens are trained too; the last one may hold more "
            "text than the stop."
        ),
        json_schema_extra=about("a trained model ends by itself"),
    )
    baseline: Literal["mean", "leave-one-out"] = Field(
        "mean",
        description="What a reward is compared with: the mean of its group, or of the others in it (RLOO).",
        json_schema_extra=about("as in the GRPO paper; the other is G / (G - 1) times as large before advantage_std"),
    )
    advantage_std: Literal["group", "batch", "none"] = Field(
        "group",
        description="What centred rewards are divided by (unbiased std + 1e-6).",
        json_schema_extra=about("as in the GRPO paper; none avoids its bias towards easy and hard prompts"),
    )
    zero_variance: Literal["keep", "drop"] = Field(
        "keep",
        description=(
            "Groups whose rewards are all equal: train on them (zero advantage) or drop them. Counted either way."
        ),
        json_schema_extra=about("the batch keeps its size; such groups add only their entropy"),
    )
    truncated: Literal["keep", "mask"] = Field(
        "keep",
        description="Completions cut off by max_new_tokens: train on them, or mask them after the group statistics.",
        json_schema_extra=about("as in the GRPO paper; mask if long completions are not worse ones"),
    )
    objective: Literal["grpo", "gspo", "cispo"] = Field(
        "grpo",
        description="The policy term of the loss. grpo: each token's ratio is clipped; gspo: each sequence's; cispo: a "
        "token's ratio is a clipped weight on its log-prob. Others are presets.",
        json_schema_extra=about("the one of the GRPO paper, of DAPO and of Dr. GRPO"),
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2,
        description="Ratio clip: lower bound is 1 - clip_low. Not read by objective: cispo.",
        json_schema_extra=about("the usual value of PPO; gspo takes 3e-4", unit="ratio"),
    )
    clip_high: PositiveFloat = Field(
        0.2,
        description="Ratio clip: upper bound is 1 + clip_high.",
        json_schema_extra=about("symmetric, as in PPO; DAPO takes 0.28, gspo 4e-4, cispo 4", unit="ratio"),
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="Bound c of the dual clip for negative advantages; null: off. For objective: grpo.",
        json_schema_extra=about("a correction that is rarely needed after one rollout", unit="ratio"),
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = Field(
        "token-mean",
        description=(
            "How token losses become one number; denominators are global over an optimizer update. dr-grpo: sum / "
            "(sequences x max_new_tokens)."
        ),
        json_schema_extra=about("every token counts alike, long answers are not diluted"),
    )
    entropy_coefficient: float = Field(
        0.0,
        description="Entropy bonus; entropy is always measured.",
        json_schema_extra=about("a bonus changes the optimum; watch the entropy first", unit="factor"),
    )
    kl_coefficient: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the divergence from a frozen reference policy; 0: no reference policy. A trainer rank "
        "keeps the reference's shard in host memory (2 or 4 bytes per parameter) and computes its log-probs itself.",
        json_schema_extra=about("DAPO and Dr. GRPO go without; the GRPO paper takes 0.04", unit="factor"),
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="KL(pi || pi_ref) of a token, with d = log pi_ref - log pi: k1 = -d, k2 = d^2 / 2, "
        "k3 = e^d - d - 1.",
        json_schema_extra=about("never negative, of low variance, and the GRPO paper's; k1 is usual in the reward"),
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: the coefficient times each token's KL is added to its loss. reward: the coefficient times "
        "the sum of a completion's KL, at the iteration's start, is taken off its reward before the advantages.",
        json_schema_extra=about("as in the GRPO paper; the reward costs another forward pass before the step"),
    )
    reference_path: Path | None = Field(
        None,
        description="Model folder of the reference policy, of the policy's own sizes; null: model.path.",
        json_schema_extra=about("the policy is kept near its start"),
    )
    reference_refresh_every: PositiveInt | None = Field(
        None,
        description="Train steps after which the policy becomes the reference, again and again; null: never. With it "
        "checkpoints hold the reference too.",
        json_schema_extra=about("a frozen reference bounds the run as a whole, not the last steps", unit="train steps"),
    )
    old_logprobs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="pi_old: recomputed by the trainer at a step's start, or taken from the engine (one forward less).",
        json_schema_extra=about("exact whatever the engine's numerics; costs a forward pass"),
    )
    correction: Literal["none", "importance", "tis", "icepop", "mis"] = Field(
        "none",
        description="Weights w = pi_old / pi_roll on the token losses, for what engine and trainer compute differently "
        "or a stale policy sampled. importance: w; tis: w, truncated to the bounds; icepop, mis: w within the bounds, "
        "else 0. Needs old_logprobs: recompute.",
        json_schema_extra=about("not needed while trainer and engine agree"),
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="What w is of: a token; a sequence, the product over its tokens; or geometric, the mean of that "
        "product per token. icepop: token.",
        json_schema_extra=about("bounded variance; a product is exact, and far from 1 for long completions"),
    )
    correction_low: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Lower bound of w; null: none. For tis, icepop (which needs it) and mis.",
        json_schema_extra=about("small weights do no harm; IcePop takes 0.5", unit="ratio"),
    )
    correction_high: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="Upper bound of w; tis, icepop and mis need it.",
        json_schema_extra=about("no default: 2 is usual for tokens, IcePop takes 5", unit="ratio"),
    )
    on_non_finite: Literal["fail", "skip"] = Field(
        "fail",
        description="What a loss or gradient that is not finite does: fail undoes the step and ends the run; skip "
        "leaves that optimizer update out, counts it (skipped_updates) and continues until non_finite_budget is spent.",
        json_schema_extra=about("the first NaN is nearly always a mistake, not chance"),
    )
    non_finite_budget: PositiveInt = Field(
        10,
        description="Updates that on_non_finite: skip leaves out over the run, resumed or not; the next one fails.",
        json_schema_extra=about("a rare overflow in bfloat16 passes, a broken setting does not", unit="updates"),
    )
    logprob_diff_limit: PositiveFloat | None = Field(
        None,
        description=(
            "|log pi_trainer - log pi_engine| after a sync above which there is a warning: of any token in float32, of "
            "more than one in a thousand in bfloat16, where a mean above 0.05 is one too. null: 1e-4 in float32, 0.5 "
            "in bfloat16."
        ),
        json_schema_extra=about(
            "float32 on both sides stays below it; in bfloat16 the largest of millions of tokens says nothing",
            unit="nats",
        ),
    )
    logprob_diff_stop: PositiveFloat | None = Field(
        0.25,
        description=(
            "Mean |log pi_trainer - log pi_engine| over an iteration's tokens above which the run ends, since the two "
            "do not compute the same model. null: never."
        ),
        json_schema_extra=about(
            "rounding in bfloat16 is a tenth of it, a wrong rotary scaling many times it", unit="nats"
        ),
    )

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
