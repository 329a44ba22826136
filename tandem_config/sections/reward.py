"""How completions are scored."""

from typing import Annotated, Literal

from pydantic import Field

from tandem_config.sections.base import Section, about


class RewardSection(Section):
    """How completions are scored."""

    kind: Literal["exact_match", "regex", "math_verify"] = Field(
        "exact_match",
        description="Registered reward function.",
        json_schema_extra=about("the one that needs no other setting"),
    )
    require_stop: bool = Field(
        True,
        description="Score completions that were cut off by the length limit 0, whatever they contain.",
        json_schema_extra=about("a completion that does not end would be rewarded for its beginning"),
    )
    pattern: str | None = Field(
        None,
        description="regex: pattern searched in the completion; with a group, group 1 must equal the answer.",
        json_schema_extra=about("only regex needs it"),
    )
    find_answer: Literal["anywhere", "anchored"] = Field(
        "anywhere",
        description=(
            "math_verify: where a completion's answer is looked for. anchored: only in \\boxed{}, after #### or after "
            "the word answer; anywhere: else the last expression or number of the text."
        ),
        json_schema_extra=about("a policy that has not learnt the format yet is rewarded for right answers"),
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        3.0,
        description=(
            "regex, math_verify: CPU seconds for scoring one completion; one that takes longer scores 0 and is counted "
            "(reward_timeouts)."
        ),
        json_schema_extra=about("math-verify takes 7 ms on average, 0.1 s in one of a hundred", unit="s"),
    )
    workers: Annotated[int, Field(gt=0, le=1024)] = Field(
        2,
        description="regex, math_verify: processes of the coordinator that score.",
        json_schema_extra=about("1,000 completions in a few seconds", unit="processes"),
    )
    weight: float = Field(
        1.0,
        description="Factor on the score.",
        json_schema_extra=about("advantages are divided by the spread anyway", unit="factor"),
    )
