"""docs/adding-a-model.md, carried out: its code blocks are all that a family needs."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.errors import ConfigError
from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from tests.unit.weightsync.test_plan import move
from weightsync.families import FAMILIES
from weightsync.families.decoder import ATTENTION_RULES, MLP_RULES
from weightsync.families.family import Family
from weightsync.families.rule import CanonicalPart, Placement, Rule
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.plans.plan import make_plan
from weightsync.transfer.coverage import Coverage

GUIDE = (Path(__file__).parents[3] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n# (.*?)\n(.*?)```", GUIDE, re.DOTALL)
NORM = "model.layers.{}.post_feedforward_layernorm.weight"
TRAINER = Parallel(tensor=2, pipeline=2, virtual_pipeline=2, data=2)


def carry_out(title: str) -> dict[str, Any]:
    """Runs the guide's blocks whose title begins so, with the names that the two files have."""
    blocks = [code for heading, code in BLOCKS if heading.startswith(title)]
    assert blocks, f"the guide has no block {title!r}"
    names: dict[str, Any] = {
        "FAMILIES": FAMILIES,
        "Family": Family,
        "Rule": Rule,
        "CanonicalPart": CanonicalPart,
        "Placement": Placement,
        "ATTENTION_RULES": ATTENTION_RULES,
        "MLP_RULES": MLP_RULES,
    }
    for code in blocks:
        exec(code, names)
    return names


def with_rules(rules: tuple[Rule, ...]) -> None:
    """Gives the made-up family other rules."""
    FAMILIES["sandwich"] = dataclasses.replace(FAMILIES["sandwich"], rules=rules)


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    """What a test adds is gone after it."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def test_llama_is_what_the_guide_says() -> None:
    family = FAMILIES.pop("llama")
    with pytest.raises(ConfigError, match="llama"):
        tiny_spec("llama")
    carry_out("Llama 3")
    assert dataclasses.replace(family, presets={}) == FAMILIES["llama"]


def test_a_made_up_family_is_imported_synced_and_exported() -> None:
    with pytest.raises(ConfigError, match="sandwich"):
        tiny_spec("sandwich")
    carry_out("A family with a norm")
    spec = tiny_spec("sandwich")
    full = canonical_tensors(spec)
    assert NORM.format(3) in full
    files, trainer, rollout = hf_layout(spec), megatron_layout(spec, TRAINER), sglang_layout(spec, Parallel(tensor=4))
    imported = move(files, trainer, full, 50)
    for rank, store in enumerate(imported):
        assert same(store, cut(trainer, rank, full)) == []
    # Layer 1 is the first of the second stage: chunk 0, local layer 0.
    assert torch.equal(imported[4]["decoder.layers.0.post_mlp_layernorm.weight"], full[NORM.format(1)])
    for rank, store in enumerate(move(trainer, rollout, full, 50)):
        assert same(store, cut(rollout, rank, full)) == []
    assert same(move(trainer, files, full, 50)[0], full) == []


def test_what_the_rules_forget_or_invent_is_named_as_the_guide_shows() -> None:
    carry_out("A family with a norm")
    layout = sglang_layout(tiny_spec("sandwich"), Parallel())
    tensors = empty_like_rank(layout, 0)
    Coverage(layout, 0, "rollout-0/0").check(tensors)
    surprise = {**tensors, "model.layers.0.surprise.weight": torch.zeros(2)}
    forgotten = {name: tensor for name, tensor in tensors.items() if name != NORM.format(0)}
    reshaped = {**tensors, "model.norm.weight": torch.zeros(17)}
    for engine, shown in (
        (surprise, None),
        (forgotten, ("model.layers.0.forgotten.weight", NORM.format(0))),
        (reshaped, None),
    ):
        with pytest.raises(ConfigError) as caught:
            Coverage(layout, 0, "rollout-0/0").check(engine)
        message = str(caught.value)
        assert (message.replace(shown[1], shown[0]) if shown else message) in GUIDE


def test_a_rule_that_only_one_side_has_is_named_before_planning() -> None:
    carry_out("A family with a norm")
    spec = tiny_spec("sandwich")
    source = megatron_layout(spec, Parallel())
    with_rules(FAMILIES["qwen3"].rules)
    with pytest.raises(ConfigError, match=r"the target lacks \['model\.layers\.0\.post_feedforward_layernorm"):
        make_plan(source, sglang_layout(spec, Parallel()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sglang": "model.norm.weight"}, r"SGLang parameter model\.norm\.weight"),
        ({"megatron": ("decoder.final_layernorm.weight",)}, r"Megatron parameter decoder\.final_layernorm\.weight"),
        (
            {"parts": (CanonicalPart(name="lm_head.weight", rows="vocab", cols="hidden"),)},
            r"canonical tensor lm_head\.weight",
        ),
    ],
)
def test_names_that_clash_are_refused(change: dict[str, Any], named: str) -> None:
    (rule,) = carry_out("A family with a norm")["SANDWICH_RULES"]
    with_rules((*ATTENTION_RULES, *MLP_RULES, dataclasses.replace(rule, **change)))
    with pytest.raises(ConfigError, match=named):
        tiny_spec("sandwich").rules()


def test_a_shape_that_is_unknown_to_the_spec_is_named() -> None:
    (rule,) = carry_out("A family with a norm")["SANDWICH_RULES"]
    odd = dataclasses.replace(rule, parts=(CanonicalPart(name=rule.parts[0].name, rows="hiden"),))
    with_rules((*ATTENTION_RULES, *MLP_RULES, odd))
    with pytest.raises(ConfigError, match=r"post_feedforward_layernorm.*'hiden'"):
        hf_layout(tiny_spec("sandwich"))
