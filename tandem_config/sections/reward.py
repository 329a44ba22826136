r"""How completions are scored: one reward, or a list of them whose weighted scores are added.

reward: {kind: math_verify}

reward:
  - {kind: math_verify}
  - {kind: format, pattern: '<think>.*</think>.*', weight: 0.2}
  - {function: my_rewards.py:score, weight: 0.5, args: {depth: 3}}
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, ValidationInfo, field_validator

from tandem_config.sections.base import PositiveInt, setting
from tandem_config.sections.rewards.base import FailureSection, Pattern, RewardSection, StopSection, Timeout, wrong
from tandem_config.sections.rewards.servers import JudgeReward, RemoteReward

# `FILE.py:FUNCTION` or `package.module:FUNCTION`. Loading makes the file absolute.
CodeReference = NewType("CodeReference", str)

Value = TypeVar("Value")
Workers = Annotated[int, Field(gt=0, le=1024)]
_REFERENCE = re.compile(r"(?P<place>.*[^:]):(?P<name>[^\W\d]\w*)", re.DOTALL)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class TextSection(FailureSection):
    """A reward that works in processes of its own, because one text may take it for ever."""

    timeout_s: Timeout = setting(3.0, "math-verify takes 7 ms on average, 0.1 s in one of a hundred", "s")
    """CPU seconds for scoring one completion; one that takes longer is treated as on_error says and counted
    (reward_timeouts)."""
    workers: Workers = setting(2, "1,000 completions in a few seconds", "processes")
    """Processes of the coordinator that score."""


class ExactMatchReward(StopSection):
    """1 if the completion is the answer, letter by letter, else 0."""

    kind: Literal["exact_match"] = setting("exact_match", "the one that needs no other setting")
    """Kind of reward."""


class RegexReward(TextSection):
    """1 if a pattern is found in the completion and, if it has a group, group 1 of its last match is the answer."""

    kind: Literal["regex"] = setting(..., "chosen by name")
    """Kind of reward."""
    pattern: Pattern = setting(..., "no default: it depends on the task")
    r"""Python regular expression, searched in the completion; with a group, group 1 must equal the answer, e.g. 'answer
    is (\d+)'."""


class FormatReward(TextSection):
    """1 if the whole completion has a form, else 0; the answer does not matter."""

    kind: Literal["format"] = setting(..., "chosen by name")
    """Kind of reward."""
    pattern: Pattern = setting(..., "no default: it depends on the task")
    """Python regular expression that the whole completion must match; a dot is any character, line ends too, e.g.
    '<think>.*</think>.*'."""


class MathVerifyReward(TextSection):
    """1 if math-verify finds the completion's answer equal to the row's, else 0; docs/numerics.md says how it reads."""

    kind: Literal["math_verify"] = setting(..., "chosen by name")
    """Kind of reward."""
    find_answer: Literal["anywhere", "anchored"] = setting(
        "anywhere", "a policy that has not learnt the format yet is rewarded for right answers"
    )
    r"""Where a completion's answer is looked for. anchored: only in \boxed{}, after #### or after the word answer;
    anywhere: else the last expression or number of the text."""


class LengthReward(RewardSection):
    """1 up to (or from) a length in tokens, 0 from (or up to) another, and linear between them."""

    kind: Literal["length"] = setting(..., "chosen by name")
    """Kind of reward."""
    full_tokens: int = setting(..., "no default: it depends on the task", "tokens", ge=0)
    """Length that earns 1; so does what is further away from zero_tokens."""
    zero_tokens: int = setting(..., "no default: it depends on the task", "tokens", ge=0)
    """Length that earns 0; less than full_tokens rewards long completions, more rewards short ones."""

    @field_validator("zero_tokens")
    @classmethod
    def _lengths_differ(cls, zero_tokens: int, info: ValidationInfo) -> int:
        if zero_tokens == info.data.get("full_tokens"):
            raise wrong("is full_tokens: no length would be in between", "make one of them longer")
        return zero_tokens


class OverlongReward(RewardSection):
    """DAPO's soft overlong punishment: 0, falling from 0 to -1 over the last tokens before grpo.max_new_tokens."""

    kind: Literal["overlong"] = setting(..., "chosen by name")
    """Kind of reward."""
    cache_tokens: PositiveInt | None = setting(None, "as in DAPO: 4,096 of 20,480", "tokens")
    """The last tokens before grpo.max_new_tokens, over which the score falls; null: a fifth of it."""


class EnvironmentReward(RewardSection):
    """What the environment gave for an episode's turns, added up (docs/environments.md)."""

    kind: Literal["environment"] = setting(..., "chosen by name")
    """Kind of reward."""


class FunctionReward(FailureSection):
    """Your own Python function, in processes of its own (docs/rewards.md)."""

    kind: Literal["function"] = setting("function", "`function:` alone says it")
    """Kind of reward."""
    function: CodeReference = setting(..., "no default: it is yours")
    """FILE.py:FUNCTION, the file relative to this one, or package.module:FUNCTION."""
    args: dict[str, JsonValue] = setting(factory=dict, why="most functions need none")
    """Values for parameters of the function, by name."""
    per: Literal["sample", "batch", "group"] | None = setting(None, "a signature says it")
    """What one call scores; null: a batch if a parameter is called completions, prompts or answers, else a sample.
    group: all completions of a prompt, for rankings."""
    completions: Literal["text", "messages"] = setting("text", "most functions take texts")
    """What prompts and completions are for the function: texts, or lists of messages, as TRL gives them for
    conversational data (`completions[0][0]['content']`)."""
    batch_size: PositiveInt | None = setting(
        None, "enough for a model's forward pass; a call that fails costs no more", "samples"
    )
    """per: batch: most completions in a call; null: 128."""
    concurrency: PositiveInt | None = setting(None, "what a server of one's own bears", "calls")
    """async def: calls at a time in each of the workers; null: 16."""
    require_stop: bool = setting(False, "the function sees `truncated`, and 0 need not be the worst score")
    """Score completions that were cut off by the length limit 0, without a call."""
    timeout_s: Timeout = setting(10.0, "a program that is tried, a request to a server", "s")
    """Seconds for a call; one that takes longer fails."""
    start_timeout_s: Timeout = setting(
        120.0, "large libraries on a busy machine; a model that it loads may take longer", "s"
    )
    """Seconds for importing the file, once in each of the workers."""
    workers: Workers = setting(2, "a hang or a crash stops one of them only", "processes")
    """Processes of the coordinator that call it."""
    memory_mib: int = setting(4096, "one call must not take the coordinator with it", "MiB", ge=64)
    """Memory that each of the workers may allocate; beyond it Python raises MemoryError."""

    trial: bool = setting(True, "engines take minutes to start; false for a call that costs money or has effects")
    """Call it once before anything starts (tandem check, tandem run): on the first row, with its answer as the
    completion. What fails then is a warning."""

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        return self.name or self.function.rpartition(":")[2]

    @field_validator("batch_size")
    @classmethod
    def _is_read(cls, batch_size: int | None, info: ValidationInfo) -> int | None:
        per = info.data.get("per")
        if batch_size is not None and per not in (None, "batch"):
            raise wrong(f"does nothing with per: {per}", "leave it out, or set per: batch")
        return batch_size

    @field_validator("function")
    @classmethod
    def _is_a_reference(cls, reference: CodeReference) -> CodeReference:
        return checked_reference(reference, "my_rewards.py:score")


def checked_reference(reference: CodeReference, example: str) -> CodeReference:
    """Return a reference that has the form, for a validator; raises the error of one that has not."""
    match = _REFERENCE.fullmatch(reference)
    hint = f"e.g. {example}, or package.module:{example.partition(':')[2]}"
    if match is None:
        raise wrong("needs the form FILE.py:NAME", hint)
    if not match["place"].endswith(".py") and not _MODULE.fullmatch(match["place"]):
        raise wrong(f"{match['place']!r} is neither a .py file nor a module", hint)
    return reference


def split_reference(reference: str) -> tuple[str, str]:
    """Split `PLACE:FUNCTION` into file or module, and function."""
    place, _, name = reference.rpartition(":")
    return place, name


REWARD_KINDS: Mapping[str, type[RewardSection]] = {
    "exact_match": ExactMatchReward,
    "regex": RegexReward,
    "format": FormatReward,
    "math_verify": MathVerifyReward,
    "length": LengthReward,
    "overlong": OverlongReward,
    "environment": EnvironmentReward,
    "function": FunctionReward,
    "remote": RemoteReward,
    "judge": JudgeReward,
}


def _kind_of(value: Any) -> str | None:
    """Return the kind of a reward that is a mapping or built already; None if it is something else."""
    if isinstance(value, Mapping):
        return str(value.get("kind", "function" if "function" in value else "exact_match"))
    return getattr(value, "kind", None)


def _as_tuple(value: Value | list[Value]) -> tuple[Value, ...]:
    if isinstance(value, list | tuple):
        if not value:
            raise wrong("is an empty list", "leave it out for exact_match, or name a reward")
        return tuple(value)
    return (value,)


Reward = Annotated[
    Annotated[ExactMatchReward, Tag("exact_match")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[FormatReward, Tag("format")]
    | Annotated[MathVerifyReward, Tag("math_verify")]
    | Annotated[LengthReward, Tag("length")]
    | Annotated[OverlongReward, Tag("overlong")]
    | Annotated[EnvironmentReward, Tag("environment")]
    | Annotated[FunctionReward, Tag("function")]
    | Annotated[RemoteReward, Tag("remote")]
    | Annotated[JudgeReward, Tag("judge")],
    Discriminator(_kind_of),
]
Rewards = Annotated[tuple[Reward, ...], BeforeValidator(_as_tuple)]
