"""One table of mapping rules per model family; `rules_for` picks it. Adding a model is adding rows."""

from weightsync.mapping.dense import DENSE_RULES
from weightsync.mapping.rule import Part, Placement, Rule
from weightsync.model_spec import ModelSpec

_TABLES: dict[str, tuple[Rule, ...]] = {"qwen2": DENSE_RULES, "qwen3": DENSE_RULES}

__all__ = ["Part", "Placement", "Rule", "rules_for"]


def rules_for(spec: ModelSpec) -> tuple[Rule, ...]:
    """The rules that apply to this model, in canonical order."""
    flags = {"always": True, "untied": not spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    return tuple(rule for rule in _TABLES[spec.family] if flags[rule.when])
