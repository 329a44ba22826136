"""Evaluations: sets of prompts with their own sampling, what is measured on them, and the best checkpoint."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from tandem_config.sections.base import Fraction, ListOf, PositiveInt, Section, about
from tandem_config.sections.data import Sources

# The set that data.heldout makes; its mean is the held-out accuracy.
HELDOUT = "heldout"


class EvaluationSet(Section):
    """A set of prompts, and how their completions are sampled."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")] = Field(
        description="Name in metrics (`eval/<name>/mean@1`), events and samples."
    )
    data: Sources = Field(description="Rows, in the forms of data.heldout, with the columns of the section data.")
    samples: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="Completions per prompt, k.")
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(0.0, description="Sampling temperature; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Share of probability that is kept.")
    top_k: Annotated[int, Field(ge=-1)] = Field(-1, description="Number of likeliest tokens that are kept; -1: all.")
    min_p: Fraction = Field(0.0, description="Least probability that is kept, relative to the likeliest token's.")
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = Field(
        1.0, description="Penalty on tokens that have occurred; 1: none."
    )
    max_new_tokens: PositiveInt | None = Field(None, description="Longest completion; null: grpo.max_new_tokens.")
    every: PositiveInt | None = Field(None, description="Iterations between evaluations; null: run.evaluate_every.")
    num_prompts: PositiveInt | None = Field(None, description="The first n prompts of the data only; null: all.")

    def metrics(self) -> Iterator[str]:
        """Yield the names of what is measured: `mean@8`, `pass@2`, `pass@4`, `pass@8`, `maj@8`."""
        yield f"mean@{self.samples}"
        if self.samples > 1:
            yield from (f"pass@{k}" for k in _powers_below(self.samples))
            yield f"pass@{self.samples}"
            yield f"maj@{self.samples}"


def _powers_below(limit: int) -> Iterator[int]:
    power = 2
    while power < limit:
        yield power
        power *= 2


class EvaluationSection(Section):
    """Evaluations of the policy beside data.heldout; docs/evaluation.md."""

    sets: ListOf[EvaluationSet] = Field(
        (),
        description=(
            "Sets of prompts, each `{name, data, samples, temperature, top_p, top_k, min_p, repetition_penalty, "
            "max_new_tokens, every, num_prompts}`."
        ),
        json_schema_extra=about("data.heldout makes one, called heldout: a greedy completion per prompt"),
    )
    right_from: float = Field(
        1.0,
        description="Least score of a right completion, for pass@k.",
        json_schema_extra=about("the score of a right answer", unit="score"),
    )
    best: str | None = Field(
        None,
        description=(
            "Metric of the best checkpoint, `<set>/<metric>`, e.g. heldout/mean@1; the higher the better. Its "
            "checkpoint is kept beside run.keep_checkpoints. null: none."
        ),
        json_schema_extra=about("it doubles the checkpoints, and not every run has an evaluation that decides"),
    )
    save_best: bool = Field(
        True,
        description=(
            "Write a checkpoint whenever evaluation.best improves; false: only checkpoints of run.checkpoint_every can "
            "be the best."
        ),
        json_schema_extra=about("the best policy is seldom that of a checkpoint by chance"),
    )
    concurrent: bool = Field(
        False,
        description=(
            "Evaluate a policy while the trainer takes its next step, on the replicas that still serve it, instead of "
            "before it; the figures then stand in the next iteration's row, with their policy version."
        ),
        json_schema_extra=about("a row then has the figures of the policy that it made"),
    )
