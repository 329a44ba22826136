"""What all rewards have: a name, a weight, and how failures are treated."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from tandem_config.sections.base import Fraction, Section, setting

Timeout = Annotated[float, Field(gt=0, le=3600)]
_NAME = re.compile(r"[A-Za-z]\w{0,39}", re.ASCII)


def wrong(message: str, suggestion: str = "", *, secret: bool = False) -> PydanticCustomError:
    """Make the error of a setting whose value is wrong, for a validator to raise.

    Args:
        secret: do not show the value.
    """
    context = {"message": message, "suggestion": suggestion, "secret": secret}
    return PydanticCustomError("setting", "{message}", context)


def compiled(pattern: str) -> str:
    """Return a pattern that compiles, for a validator; raises the error of one that does not."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(f"is not a regular expression: {error}", "in YAML, put the pattern in single quotes") from error
    return pattern


Pattern = Annotated[str, AfterValidator(compiled)]


class RewardSection(Section):
    """How completions are scored: one reward, or a list of them whose weighted scores are added (docs/rewards.md)."""

    name: str | None = setting(None, "several rewards of a kind need names that tell them apart")
    """Name in metrics (reward/NAME_mean) and messages; null: the kind, or the function's name."""
    weight: float = setting(1.0, "one reward needs none: advantages are divided by the spread", "factor")
    """Factor on the score; a sample's reward is the sum over all rewards. 0: measured, not trained on."""
    accuracy: bool = setting(False, "the first in a list is usually the one for being right")
    """Whether the mean of this reward's unweighted scores is the accuracy (heldout_accuracy, run.target_accuracy); if
    no reward says so, the first one."""

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        return self.name or str(getattr(self, "kind", "reward"))

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is None or _NAME.fullmatch(name):
            return name
        raise wrong("must be at most 40 letters, digits and '_', and start with a letter")


class StopSection(RewardSection):
    """A reward that a completion without an end does not earn."""

    require_stop: bool = setting(True, "a completion that does not end would be rewarded for its beginning")
    """Score completions that were cut off by the length limit 0, whatever they contain."""


class FailureSection(StopSection):
    """A reward whose scoring may fail."""

    on_error: Literal["zero", "drop", "stop"] = setting(
        "zero", "what breaks a scorer is more often a bad completion than a good one"
    )
    """What a completion gets that could not be scored. zero: the score 0; drop: no reward at all, so that it is left
    out of its group's statistics and of training; stop: the run ends. Counted in any case."""
    max_error_share: Fraction = setting(
        0.05, "a few failures must not end a run, a broken reward must not train it", "share"
    )
    """Share of a batch's completions whose scoring may fail; above it the run ends."""
