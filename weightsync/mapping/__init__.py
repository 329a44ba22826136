"""One table of mapping rules per model family; `rules_for` picks it. Adding a model is adding rows."""

from weightsync.mapping.dense import ATTENTION_RULES, MLP_RULES
from weightsync.mapping.experts import EXPERT_RULES
from weightsync.mapping.rule import Part, Placement, Rule
from weightsync.model_spec import ModelSpec

_DENSE = ATTENTION_RULES + MLP_RULES
_TABLES: dict[str, tuple[Rule, ...]] = {
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "llama": _DENSE,
    "qwen3_moe": _DENSE + EXPERT_RULES,
}

__all__ = ["Part", "Placement", "Rule", "rules_for"]


def rules_for(spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules that apply to this model, in canonical order."""
    flags = {"always": True, "untied": not spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    return tuple(rule for rule in _TABLES[spec.family] if flags[rule.when])
