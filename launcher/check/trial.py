"""Tries a user's own reward function before a run: imports it in a worker as the run will, and lets it score once.

What the call raises is a warning: a function may rightly refuse the completion that it is tried with, or need what only
the run has.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.rewards.base import ScoredText, TakenColumns
from coordinator.rewards.function import OwnFunction
from tandem_clients.formatting import PromptText
from tandem_config.problems import ConfigProblem, problem
from tandem_config.sections.reward import FunctionReward
from tandem_files.rows.reading import Row
from tandem_files.tokenizer import TextCodec

# A call may be allowed an hour; a check does not wait for that.
MOST_S = 30.0
# What Python says to completion[0]["content"] of a text.
_INDEXED = "string indices must be integers"


@dataclass(frozen=True)
class Trial:
    """What a function is tried on: a row, with its answer as the completion.

    Attributes:
        group_size: completions that a function of a group gets.
        decoding: how completions are decoded: arguments of TextCodec.as_written.
        alone: whether there is no other reward.
    """

    row: Row
    prompt: PromptText
    codec: TextCodec | None
    group_size: int
    decoding: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def text(self) -> str:
        """What is tried, for messages."""
        completion = "with its answer as the completion" if self.row.answer else "with an empty completion"
        return f"{self.row.file}:{self.row.number}, {completion}"

    def items(self, per: str) -> list[ScoredText]:
        """Return the completions of one call."""
        completion = self.row.answer
        ids = []
        if self.codec is not None:
            (ids,) = self.codec.encode_rendered([completion])
            completion = self.codec.as_written(completion, **self.decoding)
        return [
            ScoredText(
                completion=completion,
                answer=self.row.answer,
                truncated=False,
                num_tokens=len(ids) + 1,
                prompt=self.prompt.text,
                messages=self.prompt.messages,
                completion_ids=ids,
                columns=self.row.columns,
                sample_id=f"check.g0.row{self.row.number}#{index}",
            )
            for index in range(self.group_size if per == "group" else 1)
        ]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What trying a function has shown.

    Attributes:
        takes: the columns that it takes.
        error: why it cannot be used; "": it can.
        failure: why it could not score the trial; "": it could, or was not called.
        unknown: parameters with names of other trainers for which the rows have nothing.
    """

    section: FunctionReward
    takes: TakenColumns = field(default_factory=TakenColumns)
    error: str = ""
    failure: str = ""
    unknown: Sequence[str] = ()

    @classmethod
    async def of(cls, section: FunctionReward, columns: Sequence[str] | None, trial: Trial | None) -> "TrialResult":
        """Try a function in one worker.

        Args:
            columns: the columns that rows of the data have; None: not known, so not compared.
            trial: None: it is only imported.
        """
        reward = OwnFunction(section.model_copy(update={"workers": 1}), output=False)
        try:
            await reward.start(columns)
            takes = reward.takes
            possible = trial is not None and section.trial and all(name in trial.row.columns for name in takes.required)
            failure = await _failure(reward, section, trial) if trial is not None and possible else ""
            lacking = [name for name in reward.assumed if name.removesuffix("s") == "data_source"]
            unknown = [name for name in lacking if columns is not None and "data_source" not in columns]
            return cls(section=section, takes=takes, failure=failure, unknown=unknown)
        except ValueError as error:
            return cls(section=section, error=str(error))
        finally:
            await reward.close()

    def problems(self, key: str) -> Iterator[ConfigProblem]:
        """Yield the error or warning. key: the reward's key in the configuration."""
        if self.error:
            yield problem(f"{key}.function", self.section.function, self.error)
        for name in self.unknown:
            yield problem(
                f"{key}.function",
                self.section.function,
                f"takes {name!r}, which no row has, so that it gets None",
                f"add the column data_source to the rows, or set {key}.args: {{{name}: ...}}",
                severity="warning",
            )
        if self.failure:
            texts = _INDEXED in self.failure and self.section.completions == "text"
            yield problem(
                f"{key}.function",
                self.section.function,
                self.failure,
                "set completions: messages if it takes lists of messages, as TRL gives them"
                if texts
                else "correct it, or set trial: false if it can work in the run only",
                severity="warning",
            )


async def _failure(reward: OwnFunction, section: FunctionReward, trial: Trial) -> str:
    """Let a started function score; return why it cannot."""
    try:
        async with asyncio.timeout(MOST_S):
            scores = await reward.score(trial.items(reward.per))
    except TimeoutError:
        why = f"no score after {MOST_S:g} s; the whole timeout_s = {section.timeout_s:g} s was not waited for"
    else:
        why = next(iter(scores.errors.values()), "")
        if trial.alone and scores.absent:
            why = "it returned None, and a completion to which no reward applies is left out"
    return f"tried on {trial.text}, it failed: {why}" if why else ""
