"""docs/extending.md, carried out: its smallest examples are what the code takes."""

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

from coordinator.rewards.base import Reward, ScoredText, Scores
from tandem_clients.flow import Completion
from tandem_config.checks.registry import CHECKS, Problems, check
from tandem_config.problems import problem
from tandem_config.schema import GrpoSection, RunConfig
from tandem_config.sections.base import Section, setting
from trainer_service.objectives.clipping import ratio_of
from trainer_service.objectives.tokens import Sequences, TokenLoss, Tokens

GUIDE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python\n# (.*?)\n(.*?)```", GUIDE, re.DOTALL))
MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}


def carry_out(title: str, **names: Any) -> dict[str, Any]:
    """Run the guide's block of that title, with these names. Returns: the names after it."""
    exec(BLOCKS[title], names)
    return names


def test_the_function_is_a_reward() -> None:
    short = carry_out("my_rewards.py")["short"]
    assert [short(completion="", num_tokens=tokens) for tokens in (100, 101)] == [1.0, 0.0]


async def test_the_kind_scores_texts() -> None:
    names = carry_out(
        "coordinator/rewards/ends_with.py", Reward=Reward, Scores=Scores, ScoredText=ScoredText, Sequence=Sequence
    )
    items = [ScoredText(completion=text, answer="", truncated=False) for text in ("a.", "a")]
    assert list((await names["EndsWith"](".").score(items)).values) == [1.0, 0.0]


def test_the_objective_has_the_policy_gradient() -> None:
    names = carry_out(
        "trainer_service/objectives/policy/reinforce.py",
        Tokens=Tokens,
        TokenLoss=TokenLoss,
        GrpoSection=GrpoSection,
        ratio_of=ratio_of,
        torch=torch,
    )
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.0])
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        rollout_logprobs=logprobs.detach(),
        advantages=advantages,
        sequences=Sequences(owner=torch.tensor([0, 0]), lengths=torch.tensor([2])),
    )
    names["token_loss"](tokens, GrpoSection()).loss.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -advantages)


def test_the_metric_is_a_figure_of_the_row() -> None:
    row: dict[str, Any] = {}
    completions = [
        Completion(token_ids=array("i", ids), logprobs=array("f"), truncated=False, oldest_version=1)
        for ids in ([1, 2, 3], [4])
    ]
    carry_out("coordinator/record/metrics_row.py, in build_row", row=row, completions=completions)
    assert row == {"longest_completion": 3}


def test_the_setting_has_a_default_and_bounds() -> None:
    block = BLOCKS["tandem_config/sections/run.py, in RunSection"]
    names: dict[str, Any] = {"Section": Section, "setting": setting, "__name__": __name__}
    exec("class Settings(Section):\n" + indent(block, "    "), names)
    assert names["Settings"]().pause_s == 0.0
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        names["Settings"](pause_s=-1.0)


@pytest.mark.parametrize(("iterations", "found"), [(1, 1), (2, 0)])
def test_the_check_finds_its_problem(monkeypatch: pytest.MonkeyPatch, iterations: int, found: int) -> None:
    monkeypatch.setattr("tandem_config.checks.registry.CHECKS", checks := list(CHECKS))
    carry_out("tandem_config/checks/grpo.py", check=check, RunConfig=RunConfig, Problems=Problems, problem=problem)
    sections = {"run": {"name": "r", "iterations": iterations}, "grpo": {"max_new_tokens": 2**16}}
    assert len(list(checks[-1].find(RunConfig.model_validate(MINIMAL | sections)))) == found
