"""The mapping rules of every model family, one table each. To add a model, add rows."""

from collections import Counter

from servicekit.errors import ConfigError
from weightsync.model.mapping.dense import ATTENTION_RULES, EMBEDDING, LM_HEAD, MLP_RULES
from weightsync.model.mapping.experts import EXPERT_RULES
from weightsync.model.mapping.rule import CanonicalPart, Placement, Rule
from weightsync.model.spec import ModelSpec

_DENSE = ATTENTION_RULES + MLP_RULES
# By model_type; a family's other properties are in weightsync/model/spec.py (FAMILIES).
TABLES: dict[str, tuple[Rule, ...]] = {
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "llama": _DENSE,
    "qwen3_moe": _DENSE + EXPERT_RULES,
}

__all__ = ["EMBEDDING", "LM_HEAD", "TABLES", "CanonicalPart", "Placement", "Rule", "rules_for"]


def rules_for(spec: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules that apply to this model, in canonical order.

    Raises: ConfigError: two of them have the same tensor or parameter.
    """
    flags = {"always": True, "untied": not spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    rules = tuple(rule for rule in TABLES[spec.family] if flags[rule.when])
    _check_names(rules, spec.family)
    return rules


def _check_names(rules: tuple[Rule, ...], family: str) -> None:
    for side, names in (
        ("canonical tensor", [part.name for rule in rules for part in rule.parts]),
        ("Megatron parameter", [name for rule in rules for name in rule.megatron]),
        ("SGLang parameter", [rule.sglang for rule in rules]),
    ):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ConfigError(f"two mapping rules of {family} have the {side} {twice[0]}")
