"""The run as a whole, its schedule and evaluations, and the model that it starts from."""

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
    setting,
)
from tandem_config.sections.data import Sources

# The set that data.heldout makes; its mean is the held-out accuracy.
HELDOUT = "heldout"


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = setting(
        "default", "for first runs; a second run of the name gets name-2"
    )
    """Name of the run; its folder is <output_dir>/<name> and its Redis keys carry it."""
    output_dir: Path = setting(Path("runs"), "in the working directory, never in the folder of an example")
    """Folder that holds the run's folder. Relative to the working directory."""
    iterations: PositiveInt = setting(40, "for first runs; the reward curve shows how many a task needs", "iterations")
    """GRPO iterations (rollout steps) to run."""
    seed: int = setting(0, "any fixed one: a run can be repeated", ge=0, le=2**63)
    """Seed of the data order and of the trainer."""
    checkpoint_every: PositiveInt = setting(10, "at most ten iterations are lost", "iterations")
    """Iterations between checkpoints of the trainer; the last iteration is always saved."""
    keep_checkpoints: int = setting(2, "the newest, and one in case it is damaged", "checkpoints", ge=2)
    """Newest checkpoints kept, at least two: if the newest is damaged, the one before is used."""
    checkpoint_async: bool | None = setting(
        None,
        "GPUs would wait for the disk; on CPUs the copy doubles what a rank holds, and the writer takes their cores",
    )
    """Write checkpoints while training continues, from a copy in the trainer's host memory (as large as the checkpoint,
    kept for the next). The last one, of the final iteration or a stop, is waited for. null: where the trainer computes
    on GPUs."""
    missed_checkpoint_budget: int = setting(
        2, "time to make room, while at most 30 iterations are at stake", "checkpoints", ge=0
    )
    """Checkpoints in a row that may fail (no disk space, a failed write) before the run ends; each is warned of. The
    last one, of the final iteration or a stop, must not fail. 0: the first failure ends the run."""
    full_disk_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = setting(
        600.0, "time for a person, or for what fills the disk to go", "s"
    )
    """Seconds for which a run waits for room when its disk is full, before it ends."""
    ledger_max_mib: PositiveInt = setting(8192, "8,192 completions of 32,000 tokens take 2,000 MiB", "MiB")
    """Size of what the run's ledger keeps because a crash would cost it otherwise: finished groups of the iteration
    under way and of the one after each checkpoint, and the train steps since the newest. Beyond it they are not kept,
    with a warning."""
    export_every: PositiveInt | None = setting(
        None, "an export costs the size of the model and seconds of the trainer", "iterations"
    )
    """Iterations between exports of the policy as a Hugging Face folder, exports/iteration-...; null: only the final
    one, hf/. `tandem export` makes one from any checkpoint."""
    keep_exports: PositiveInt = setting(3, "bounds the disk that a long run takes", "exports")
    """Newest exports of run.export_every kept; hf/ is none of them."""
    evaluate_every: PositiveInt = setting(5, "a curve of nine points over the default run", "iterations")
    """Iterations between evaluations, unless a set has its own; first and last always."""
    target_accuracy: float | None = setting(None, "a run ends when its iterations do, so that runs compare", "score")
    """Stop early once held-out greedy accuracy, which is a mean score (reward.accuracy), is at least this; null: run
    all iterations."""
    trainer_restarts: int = setting(2, "what fails three times does not fail by chance", "restarts", ge=0)
    """Times in a row, without a finished iteration between, that `tandem run` restarts a trainer that has died; in a
    cluster the orchestrator does that. It does the steps since its checkpoint again (docs/ledger.md)."""
    replica_restarts: int = setting(
        4, "a restart costs half an iteration at most, and engines die most often", "restarts", ge=0
    )
    """Times in a row that `tandem run` restarts a replica that has died within ten minutes; then it is left out as long
    as rollout.min_replicas others remain, and ends the run otherwise."""
    coordinator_restarts: int = setting(2, "what fails three times does not fail by chance", "restarts", ge=0)
    """Times in a row, without a finished iteration between, that `tandem run` restarts a coordinator that was killed.
    It takes over trainer and replicas as they are, and continues after its last iteration (docs/ledger.md)."""
    stop_timeout_s: PositiveFloat = setting(
        60.0, "a step and a checkpoint of some GB; a second Ctrl-C ends the wait", "s"
    )
    """Seconds after a stop signal to finish the current train step and write a last checkpoint."""
    startup_timeout_s: PositiveFloat = setting(600.0, "loading tens of GB from a shared disk takes minutes", "s")
    """Seconds for all services to become ready; even a tiny engine takes 20 s to import."""


class ModelSection(Section):
    """The policy's starting point."""

    path: Path = setting(..., "no default: it depends on the task")
    """Hugging Face model folder: config.json, *.safetensors, tokenizer.json."""
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "exact, so that trainer and engine agree to 1e-4; use bfloat16 on GPUs"
    )
    """Parameter type in trainer and rollouts. float32 is exact and the default on CPU."""
    tokenizer_path: Path | None = setting(None, "a model folder has its own")
    """Folder with tokenizer.json; null: the model's."""


class ScheduleSection(Section):
    """What waits for what."""

    kind: Literal["sync", "one_step_off", "async"] = setting("sync", "each sample is of the very policy that it trains")
    """sync: the trainer waits while replicas generate, and they wait while it trains; one_step_off: they generate the
    next iteration meanwhile, with the policy of one version before; async: they generate all the time, and the trainer
    takes what is finished. The last two need a grpo.correction, and compare trainer and engine
    (grpo.logprob_diff_stop, _limit) each 20 iterations on a few completions."""
    depth: PositiveInt = setting(1, "the trainer has its next batch when it is ready for it", "iterations")
    """async: iterations of finished groups that may wait for the trainer; while so many do, no others begin."""
    max_staleness: Annotated[int, Field(ge=1, le=16)] = setting(
        2, "both sides are busy where a batch is four times the running ones"
    )
    """async, S: iterations of groups that may be under way besides the one that is trained. A group is trained with a
    policy at most S + ceil((W - 1) / P) versions newer than the one that it began with; W: window, P:
    grpo.prompts_per_iteration."""
    window: Annotated[float, Field(ge=0)] = setting(1.0, "slow groups delay few steps; the bound is that of 0.3")
    """async, W as a share of grpo.prompts_per_iteration: of so many groups from the oldest unfinished one on, those
    that are finished may be trained before it, and no others; 0: groups are trained in their order."""
    stale: Literal["wait", "mask", "drop"] = setting("mask", "a group keeps its statistics, and its young tokens")
    """async: what is older than max_token_age. mask: such tokens are not trained; drop: nor are the others of their
    completions, which trains shorter ones than the policy samples; wait: there may be none (max_token_age is null)."""
    max_token_age: PositiveInt | None = setting(None, "everything that is sampled is trained", "versions")
    """async: versions from the policy that sampled a token to the one that trains on it; null: the bound of
    max_staleness."""

    def window_groups(self, batch: int) -> int:
        """Return W for batches of so many groups."""
        return max(1, int(self.window * batch))

    @property
    def batches_ahead(self) -> int:
        """Return the batches that may be under way beside the one that is trained."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.kind]


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
    """Evaluations of the policy besides data.heldout; docs/evaluation.md."""

    sets: ListOf[EvaluationSet] = setting((), "data.heldout makes one, called heldout: a greedy completion per prompt")
    """Sets of prompts, each `{name, data, samples, temperature, top_p, top_k, min_p, repetition_penalty,
    max_new_tokens, every, num_prompts}`."""
    right_from: float = setting(1.0, "the score of a right answer", "score")
    """Least score of a right completion, for pass@k."""
    best: str | None = setting(None, "it doubles the checkpoints, and not every run has an evaluation that decides")
    """Metric of the best checkpoint, `<set>/<metric>`, e.g. heldout/mean@1; the higher the better. Its checkpoint is
    kept besides run.keep_checkpoints. null: none."""
    concurrent: bool = setting(False, "a row then has the figures of the policy that it made")
    """Evaluate a policy while the trainer takes its next step, on the replicas that still serve it, instead of before
    it; the figures then stand in the next iteration's row, with their policy version. true with schedule.kind: async,
    where replicas of its own evaluate, and the row is that of the iteration in which they end."""
    replicas: PositiveInt | None = setting(None, "one keeps a policy, the others train on", "replicas")
    """async: replicas that evaluate beside training. They skip weight syncs and get no new groups until they are done;
    rollout.min_replicas, at least one, train on beside them. null: one of several. With a single replica each weight
    sync waits for the evaluation."""


class SamplesSection(Section):
    """Stored samples: prompts and completions with their rewards, in the run's folder `samples/`."""

    enabled: bool = setting(True, "a reward that is wrong shows in the completions, and nowhere else")
    """Store samples, for `tandem samples` and the page. Only your own user can open the folder."""
    every: PositiveInt = setting(1, "a file of the demo takes 20 KB; a thread of its own writes it", "iterations")
    """Store the samples of every n-th iteration; those of the first and of evaluations always."""
    max_mib: PositiveInt = setting(2048, "about 600 million tokens of text, next to checkpoints of many GB", "MiB")
    """Compressed size of all stored samples, of 2,000 iterations at most. Beyond it iterations are removed: more of the
    older ones, so that the first, the newest and some between them stay."""
    token_ids: bool = setting(False, "the text, with its special tokens, is nearly always enough")
    """Store each completion's token ids too."""
