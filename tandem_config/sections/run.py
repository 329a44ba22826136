"""The run as a whole, its evaluations, and the model that it starts from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tandem_config.sections.base import (
    HIGHEST_TEMPERATURE,
    Fraction,
    ListOf,
    NewTokens,
    PositiveFloat,
    PositiveInt,
    Section,
    about,
)
from tandem_config.sections.data import Sources

# The set that data.heldout makes; its mean is the held-out accuracy.
HELDOUT = "heldout"


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        "default",
        description="Name of the run; its folder is <output_dir>/<name> and its Redis keys carry it.",
        json_schema_extra=about("for first runs; a second run of the name gets name-2"),
    )
    output_dir: Path = Field(
        Path("runs"),
        description="Folder that holds the run's folder. Relative to the working directory.",
        json_schema_extra=about("in the working directory, never in the folder of an example"),
    )
    iterations: PositiveInt = Field(
        40,
        description="GRPO iterations (rollout steps) to run.",
        json_schema_extra=about("for first runs; the reward curve shows how many a task needs", unit="iterations"),
    )
    seed: Annotated[int, Field(ge=0, le=2**63)] = Field(
        0,
        description="Seed of the data order and of the trainer.",
        json_schema_extra=about("any fixed one: a run can be repeated"),
    )
    checkpoint_every: PositiveInt = Field(
        10,
        description="Iterations between checkpoints of the trainer; the last iteration is always saved.",
        json_schema_extra=about("at most ten iterations are lost", unit="iterations"),
    )
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(
        2,
        description="Newest checkpoints kept, at least two: if the newest is damaged, the one before is used.",
        json_schema_extra=about("the newest, and one in case it is damaged", unit="checkpoints"),
    )
    checkpoint_async: bool | None = Field(
        None,
        description=(
            "Write checkpoints while training continues, from a copy in the trainer's host memory (as large as the "
            "checkpoint, kept for the next). The last one, of the final iteration or a stop, is waited for. null: "
            "where the trainer computes on GPUs."
        ),
        json_schema_extra=about(
            "GPUs would wait for the disk; on CPUs the copy doubles what a rank holds, and the writer takes their cores"
        ),
    )
    missed_checkpoint_budget: Annotated[int, Field(ge=0)] = Field(
        2,
        description=(
            "Checkpoints in a row that may fail (no disk space, a failed write) before the run ends; each is warned "
            "of. The last one, of the final iteration or a stop, must not fail. 0: the first failure ends the run."
        ),
        json_schema_extra=about("time to make room, while at most 30 iterations are at stake", unit="checkpoints"),
    )
    export_every: PositiveInt | None = Field(
        None,
        description=(
            "Iterations between exports of the policy as a Hugging Face folder, exports/iteration-...; null: only the "
            "final one, hf/. `tandem export` makes one from any checkpoint."
        ),
        json_schema_extra=about("an export costs the size of the model and seconds of the trainer", unit="iterations"),
    )
    keep_exports: PositiveInt = Field(
        3,
        description="Newest exports of run.export_every kept; hf/ is none of them.",
        json_schema_extra=about("bounds the disk that a long run takes", unit="exports"),
    )
    evaluate_every: PositiveInt = Field(
        5,
        description="Iterations between evaluations, unless a set has its own; first and last always.",
        json_schema_extra=about("a curve of nine points over the default run", unit="iterations"),
    )
    target_accuracy: float | None = Field(
        None,
        description="Stop early once held-out greedy accuracy, which is a mean score (reward.accuracy), is at least "
        "this; null: run all iterations.",
        json_schema_extra=about("a run ends when its iterations do, so that runs compare", unit="score"),
    )
    trainer_restarts: Annotated[int, Field(ge=0)] = Field(
        2,
        description=(
            "Times within any hour that `tandem run` restarts a trainer that has died, from the newest checkpoint, "
            "before it gives up; in a cluster the orchestrator does that."
        ),
        json_schema_extra=about("what fails three times does not fail by chance", unit="restarts"),
    )
    replica_restarts: Annotated[int, Field(ge=0)] = Field(
        4,
        description=(
            "Times within any hour that `tandem run` restarts a replica that has died; one that dies more often is "
            "left out as long as rollout.min_replicas others remain, and ends the run otherwise."
        ),
        json_schema_extra=about(
            "a restart costs half an iteration at most, and engines die most often", unit="restarts"
        ),
    )
    coordinator_restarts: Annotated[int, Field(ge=0)] = Field(
        2,
        description=(
            "Times within any hour that `tandem run` restarts a coordinator that was killed; it resumes from the "
            "newest checkpoint and takes over trainer and replicas as they are."
        ),
        json_schema_extra=about("what fails three times does not fail by chance", unit="restarts"),
    )
    stop_timeout_s: PositiveFloat = Field(
        60.0,
        description="Seconds after a stop signal to finish the current train step and write a last checkpoint.",
        json_schema_extra=about("a step and a checkpoint of some GB; a second Ctrl-C ends the wait", unit="s"),
    )
    startup_timeout_s: PositiveFloat = Field(
        600.0,
        description="Seconds for all services to become ready; even a tiny engine takes 20 s to import.",
        json_schema_extra=about("loading tens of GB from a shared disk takes minutes", unit="s"),
    )


class ModelSection(Section):
    """The policy's starting point."""

    path: Path = Field(
        ...,
        description="Hugging Face model folder: config.json, *.safetensors, tokenizer.json.",
        json_schema_extra=about("no default: it depends on the task"),
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Parameter type in trainer and rollouts. float32 is exact and the default on CPU.",
        json_schema_extra=about("exact, so that trainer and engine agree to 1e-4; use bfloat16 on GPUs"),
    )
    tokenizer_path: Path | None = Field(
        None,
        description="Folder with tokenizer.json; null: the model's.",
        json_schema_extra=about("a model folder has its own"),
    )


class EvaluationSet(Section):
    """A set of prompts, and how their completions are sampled."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")] = Field(
        description="Name in metrics (`eval/<name>/mean@1`), events and samples."
    )
    data: Sources = Field(description="Rows, in the forms of data.heldout, with the columns of the section data.")
    samples: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="Completions per prompt, k.")
    temperature: Annotated[float, Field(ge=0, le=HIGHEST_TEMPERATURE)] = Field(
        0.0, description="Sampling temperature, 0.001 or more; 0: greedy."
    )
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = Field(1.0, description="Share of probability that is kept.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = Field(
        -1, description="Number of likeliest tokens that are kept; -1: all."
    )
    min_p: Fraction = Field(0.0, description="Least probability that is kept, relative to the likeliest token's.")
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=2)] = Field(
        1.0, description="Penalty on tokens that have occurred; 1: none."
    )
    max_new_tokens: NewTokens | None = Field(None, description="Longest completion; null: grpo.max_new_tokens.")
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
