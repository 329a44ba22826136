"""Mapping rules of mixtures of experts: the router, and gate, up and down of each expert."""

from weightsync.model.mapping.rule import CanonicalPart, Placement, Rule

_LAYER = "model.layers.{layer}.mlp."
_EXPERT = _LAYER + "experts.{expert}."
_MCORE = "decoder.layers.{layer}.mlp."

EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        parts=(CanonicalPart(name=_LAYER + "gate.weight", rows="experts", cols="hidden"),),
        megatron=(_MCORE + "router.weight",),
        sglang=_LAYER + "gate.weight",
        placement=Placement.REPLICATED,
        layers="experts",
    ),
    Rule(
        parts=(
            CanonicalPart(name=_EXPERT + "gate_proj.weight", rows="expert_ffn", cols="hidden"),
            CanonicalPart(name=_EXPERT + "up_proj.weight", rows="expert_ffn", cols="hidden"),
        ),
        megatron=(
            _MCORE + "experts.local_experts.{expert}.linear_fc1.weight",
            _MCORE + "experts.linear_fc1.weight{expert}",
        ),
        sglang=_LAYER + "experts.w13_weight",
        placement=Placement.GATE_UP,
        layers="experts",
    ),
    Rule(
        parts=(CanonicalPart(name=_EXPERT + "down_proj.weight", rows="hidden", cols="expert_ffn"),),
        megatron=(
            _MCORE + "experts.local_experts.{expert}.linear_fc2.weight",
            _MCORE + "experts.linear_fc2.weight{expert}",
        ),
        sglang=_LAYER + "experts.w2_weight",
        placement=Placement.COLUMNS,
        layers="experts",
    ),
)
