"""What a run is made of: one frozen model per section of the YAML file.

Every field states its unit and the reason for its default. Pure data: this package imports pydantic and yaml only, so
that the coordinator can read it without torch. `loading.py` turns a file and `--set` options into a `RunConfig`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
# What a request may say (servicekit/rpc/request_bounds.py); a day is longer than any round.
RoundSeconds = Annotated[float, Field(ge=0.001, le=86_400)]
MessageMib = Annotated[float, Field(ge=2**-8, le=2**16)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, and no key but the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        "default", description="Name of the run; its folder is <output_dir>/<name> and its Redis keys carry it."
    )
    output_dir: Path = Field(
        Path("runs"), description="Folder that holds the run's folder. Relative to the working directory."
    )
    iterations: PositiveInt = Field(40, description="GRPO iterations (rollout steps) to run.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of the data order and of the trainer.")
    checkpoint_every: PositiveInt = Field(
        10, description="Iterations between checkpoints of the trainer; the last iteration is always saved."
    )
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(
        2, description="Newest checkpoints kept, at least two: a damaged newest one is stepped over."
    )
    evaluate_every: PositiveInt = Field(
        5, description="Iterations between held-out evaluations; first and last always."
    )
    target_accuracy: Fraction | None = Field(
        None, description="Stop early once held-out greedy accuracy is at least this; null: run all iterations."
    )
    trainer_restarts: Annotated[int, Field(ge=0)] = Field(
        2,
        description=(
            "Times within any hour that `tandem run` starts a trainer that has died again, from the newest checkpoint, "
            "before it gives up; in a cluster the orchestrator does that."
        ),
    )
    replica_restarts: Annotated[int, Field(ge=0)] = Field(
        4,
        description=(
            "Times within any hour that `tandem run` starts a replica that has died again; one that dies more often is "
            "left out while rollout.min_replicas others are there, and ends the run otherwise."
        ),
    )
    coordinator_restarts: Annotated[int, Field(ge=0)] = Field(
        2,
        description=(
            "Times within any hour that `tandem run` starts a coordinator that was killed again, which goes on from "
            "the newest checkpoint with trainer and replicas as they are."
        ),
    )
    stop_timeout_s: PositiveFloat = Field(
        60.0, description="Seconds after a stop signal for the train step under way and a last checkpoint."
    )
    startup_timeout_s: PositiveFloat = Field(
        600.0, description="Seconds for all services to become ready; engines import for 20 s even when tiny."
    )


class ModelSection(Section):
    """The policy's starting point."""

    path: Path = Field(..., description="Hugging Face model folder: config.json, *.safetensors, tokenizer.json.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Parameter type in trainer and rollouts. float32 is exact and the default on CPU."
    )
    tokenizer_path: Path | None = Field(None, description="Folder with tokenizer.json; null: the model's.")


class DataSection(Section):
    """Prompts and answers."""

    train: Path = Field(..., description="JSONL or Parquet file of training rows.")
    heldout: Path | None = Field(None, description="JSONL or Parquet file for evaluation; null: no evaluation.")
    prompt_key: str = Field("prompt", description="Column of the prompt (a string).")
    answer_key: str = Field("answer", description="Column of the reference answer (a string).")
    shuffle: bool = Field(True, description="New order in each epoch, from run.seed; false: the file's order.")
    max_prompt_tokens: PositiveInt = Field(1024, description="Longest prompt, in tokens.")
    overlong_prompts: Literal["error", "drop"] = Field(
        "error", description="What to do with a longer prompt: stop before the start, or leave it out and count it."
    )


class RewardSection(Section):
    """How completions are scored."""

    kind: Literal["exact_match", "regex", "math_verify"] = Field(
        "exact_match", description="Registered reward function."
    )
    require_stop: bool = Field(
        True, description="0 for a completion that was cut off by the length limit, whatever it says."
    )
    pattern: str | None = Field(
        None, description="regex: pattern searched in the completion; with a group, group 1 must equal the answer."
    )
    find_answer: Literal["anywhere", "anchored"] = Field(
        "anywhere",
        description=(
            "math_verify: where a completion's answer is looked for. anchored: only in \\boxed{}, after #### or after "
            "the word answer; anywhere: else the last expression or number of the text."
        ),
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        3.0,
        description=(
            "regex, math_verify: CPU seconds for scoring one completion; one that takes longer scores 0 and is counted "
            "(reward_timeouts)."
        ),
    )
    workers: Annotated[int, Field(gt=0, le=1024)] = Field(
        2, description="regex, math_verify: processes of the coordinator that score."
    )
    weight: float = Field(1.0, description="Factor on the score.")


class GrpoSection(Section):
    """The algorithm; definitions and sources in docs/numerics.md."""

    prompts_per_iteration: PositiveInt = Field(64, description="Prompts (groups) in an iteration.")
    group_size: Annotated[int, Field(ge=2)] = Field(
        16, description="Completions per prompt; 1 would make every advantage 0."
    )
    updates_per_iteration: PositiveInt = Field(
        4,
        description="Optimizer updates in an iteration, each on an equal share of the groups' samples. More than 1: a "
        "trainer rank keeps 12 bytes per parameter that it holds in (page-locked) host memory, to undo a step.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Longest completion, in tokens.")
    temperature: PositiveFloat = Field(
        1.0, description="Sampling temperature; the trainer divides its logits by it too."
    )
    advantage_std: Literal["group", "batch", "none"] = Field(
        "group", description="What centred rewards are divided by (unbiased std + 1e-6)."
    )
    zero_variance: Literal["keep", "drop"] = Field(
        "keep",
        description=(
            "Groups whose rewards are all equal: train on them (zero advantage) or leave them out. Counted either way."
        ),
    )
    truncated: Literal["keep", "mask"] = Field(
        "keep",
        description="Completions cut off by max_new_tokens: train on them, or mask them after the group statistics.",
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Ratio clip: lower bound is 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="Ratio clip: upper bound is 1 + clip_high.")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound c of the dual clip for negative advantages; null: off."
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"] = Field(
        "token-mean",
        description=(
            "How token losses become one number; denominators are global over an optimizer update. dr-grpo: sum / "
            "(sequences x max_new_tokens)."
        ),
    )
    entropy_coefficient: float = Field(0.0, description="Entropy bonus; entropy is always measured.")
    old_logprobs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="pi_old: recomputed by the trainer at a step's start, or taken from the engine (one forward less).",
    )
    tis_cap: PositiveFloat | None = Field(
        None,
        description=(
            "Truncated importance sampling: weight min(pi_old / pi_roll, cap); null: off. Needs old_logprobs: "
            "recompute."
        ),
    )
    logprob_diff_limit: PositiveFloat = Field(
        1e-4,
        description=(
            "Largest |log pi_trainer - log pi_engine| after a sync before a warning; 1e-4 suits float32, use 0.2 "
            "for bfloat16."
        ),
    )
    logprob_diff_stop: PositiveFloat | None = Field(
        0.25,
        description=(
            "Mean |log pi_trainer - log pi_engine| over an iteration's tokens that ends the run: the two do not "
            "compute the same model. null: never."
        ),
    )


class TrainerSection(Section):
    """The Megatron trainer service."""

    tensor_parallel: PositiveInt = Field(1, description="Ranks that share each layer.")
    pipeline_parallel: PositiveInt = Field(1, description="Stages that share the layers.")
    data_parallel: PositiveInt = Field(1, description="Copies of the model, each with its share of every batch.")
    sequence_parallel: bool = Field(
        False,
        description=(
            "Split activations between layers over the tensor-parallel ranks; a mixture of experts with tensor "
            "parallelism needs it."
        ),
    )
    context_parallel: PositiveInt = Field(1, description="Ranks that share the tokens of each sequence.")
    expert_parallel: PositiveInt = Field(
        1, description="Ranks that share the experts of a layer; they are ranks of the same stage, not additional ones."
    )
    expert_tensor_parallel: PositiveInt = Field(
        1, description="Ranks that share each expert, as tensor_parallel does for the rest of a layer."
    )
    virtual_pipeline: PositiveInt = Field(
        1, description="Chunks of layers per pipeline stage, run in turns: less idle time, more messages."
    )
    first_stage_layers: PositiveInt | None = Field(
        None, description="Layers of the first pipeline stage; null: as many as the others."
    )
    last_stage_layers: PositiveInt | None = Field(
        None, description="Layers of the last pipeline stage; null: as many as the others."
    )
    embedding_counts: bool = Field(
        False, description="The embedding takes the place of a layer when layers are dealt out to pipeline stages."
    )
    loss_counts: bool = Field(
        False, description="The output layer and loss take the place of a layer when layers are dealt out."
    )
    learning_rate: PositiveFloat = Field(1e-6, description="AdamW step size at its highest.")
    learning_rate_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the step size falls over run.iterations: not at all, or to near 0 at the end."
    )
    warmup_iterations: Annotated[int, Field(ge=0)] = Field(
        0, description="Iterations over which the step size rises to its highest."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW decoupled weight decay.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first-moment decay.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW second-moment decay.")
    adam_eps: PositiveFloat = Field(1e-8, description="AdamW denominator floor.")
    clip_grad: PositiveFloat = Field(1.0, description="Largest global gradient norm.")
    max_tokens_per_micro_batch: PositiveInt = Field(
        16384, description="Padded tokens that go through the model at once; bounds activation memory."
    )
    collective_timeout_s: PositiveFloat = Field(
        300.0, description="Seconds until a trainer collective gives up on a silent peer."
    )

    @property
    def world_size(self) -> int:
        """Trainer processes; experts and virtual stages share them."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def parallel_sizes(self) -> dict[str, Any]:
        """The arguments of weightsync.layouts.layout.Parallel, which this package does not import."""
        return {
            "tensor": self.tensor_parallel,
            "pipeline": self.pipeline_parallel,
            "data": self.data_parallel,
            "context": self.context_parallel,
            "expert": self.expert_parallel,
            "expert_tensor": self.expert_tensor_parallel,
            "virtual_pipeline": self.virtual_pipeline,
            "first_stage_layers": self.first_stage_layers if self.first_stage_layers is not None else 0,
            "last_stage_layers": self.last_stage_layers if self.last_stage_layers is not None else 0,
            "embedding_counts": self.embedding_counts,
            "loss_counts": self.loss_counts,
        }


class RolloutSection(Section):
    """The SGLang rollout services."""

    replicas: PositiveInt = Field(1, description="Independent engines.")
    min_replicas: PositiveInt = Field(
        1, description="Fewest replicas that a run goes on with while others are lost; they come back as they can."
    )
    rejoin_timeout_s: Annotated[float, Field(ge=0)] = Field(
        600.0,
        description=(
            "Seconds that a run in which too few replicas are left waits for one to come, before it fails; what was "
            "generated before is kept."
        ),
    )
    tensor_parallel: PositiveInt = Field(1, description="Ranks that share one engine.")
    nodes: PositiveInt = Field(
        1, description="Hosts that each engine spans, with as many ranks on each; must divide tensor_parallel."
    )
    expert_parallel: PositiveInt = Field(
        1, description="Groups among those ranks that divide the experts; must divide tensor_parallel."
    )
    max_total_tokens: PositiveInt = Field(
        65536,
        description="KV cache size per engine, in tokens; SGLang's own default would take most of a host's memory.",
    )
    context_length: PositiveInt | None = Field(
        None, description="Longest prompt + completion, in tokens; null: the model's."
    )
    max_running_requests: PositiveInt = Field(1024, description="Completions that one engine decodes at once.")
    max_groups_per_call: PositiveInt = Field(1024, description="Groups that one GenerateGroups call may ask for.")
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.8, description="Share of GPU memory for weights and KV cache (GPUs only)."
    )
    generate_timeout_s: PositiveFloat = Field(1800.0, description="Seconds until a generate call is given up.")


class SyncSection(Section):
    """Weight sync."""

    install: Literal["in_place", "staged"] = Field(
        "in_place",
        description=(
            "in_place: no extra memory, generation pauses for the transfer; staged: one spare shard, pause is the "
            "flip only."
        ),
    )
    allow_staged_nccl: bool = Field(
        False,
        description=(
            "Move staged weights over NCCL beside the collectives of engines with several ranks, too: NCCL does not "
            "promise that both go on, and what hangs holds generation up until transfer_timeout_s. false: such a round "
            "is refused in its prepare."
        ),
    )
    pause: Literal["drain", "keep_kv", "abort_requeue"] = Field(
        "drain", description="What happens to running requests."
    )
    transport: Literal["auto", "collective", "colocated", "disk"] = Field(
        "auto",
        description=(
            "auto: colocated where all ranks are on one host and run on CPUs, collective elsewhere; collective: NCCL "
            "or gloo messages; colocated: receivers read the trainer's memory; disk: files under disk_folder."
        ),
    )
    dtype: Literal["same", "bfloat16"] = Field(
        "same",
        description="Type that weights travel and arrive in: the trainer's, or cast by the trainer (half the bytes).",
    )
    disk_folder: Path | None = Field(
        None,
        description="Where transport disk writes, the same path for every rank; null: weights/ in the run's folder.",
    )
    bucket_mib: MessageMib | None = Field(
        None,
        description=(
            "Largest message, in MiB (2^20 bytes); two per rank are in memory at once. null: 256 between GPUs, 32 "
            "between CPUs, divided by the replicas that the weights pass through (at least 4 and 1)."
        ),
    )
    link_gbit: PositiveFloat = Field(
        400.0,
        description=(
            "Gbit/s of each rank's link, each way: what the sync predicted on the dashboard is worth (nothing else "
            "uses it). 400 is a round number for one port per GPU."
        ),
    )
    formation_timeout_s: RoundSeconds = Field(60.0, description="Seconds for all ranks to meet in a new epoch.")
    transfer_timeout_s: RoundSeconds = Field(60.0, description="Seconds for one transfer.")
    probe_timeout_s: PositiveFloat = Field(
        10.0, description="Seconds for a service to say how it is before it is taken for lost."
    )
    lease_ttl_s: PositiveFloat = Field(
        15.0, description="Seconds without a heartbeat after which a rank loses its slot."
    )

    def published_folder(self, run_dir: Path) -> Path:
        """Where transport disk writes; the same for every process of a run."""
        return (self.disk_folder or run_dir / "weights").absolute()


class FleetSection(Section):
    """Who the rollout replicas are, and what the coordinator may do about them."""

    kind: Literal["registry", "kubernetes"] = Field(
        "registry",
        description=(
            "registry: replicas are whoever announces itself in Redis; kubernetes: they are also pods, watched through "
            "the Kubernetes API: leaving pods are drained, stuck ones evicted."
        ),
    )
    kubeconfig: Path | None = Field(
        None,
        description="How to reach the Kubernetes API; null: as the pod's service account, outside of a pod as kubectl.",
    )
    rollout_set: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = Field(
        "rollout", description="The set whose pods are the replicas; a replica has its pod's name."
    )
    rollout_set_kind: Literal["StatefulSet", "LeaderWorkerSet"] = Field(
        "StatefulSet",
        description=(
            "Kind of that set: StatefulSet: a pod is an engine; LeaderWorkerSet: a group of pods is, and its leader is "
            "the replica; for rollout.nodes above 1."
        ),
    )
    scale: bool = Field(
        False,
        description=(
            "Bring the rollout set to rollout.replicas at the start; false: its size is kubectl's or an autoscaler's."
        ),
    )
    stuck_after_s: PositiveFloat = Field(
        1800.0,
        description=(
            "Seconds without an answer, or without a token computed while it generates, after which a replica is stuck "
            "and its pod is evicted; the default is that of rollout.generate_timeout_s."
        ),
    )
    max_evictions_per_hour: Annotated[int, Field(ge=0)] = Field(
        4, description="Stuck pods evicted within any hour; beyond it they are only reported. 0: evict none."
    )
    unready_after_s: PositiveFloat = Field(
        60.0,
        description=(
            "Seconds that a serving replica's pod may be not ready before it loses its work; longer than a weight sync "
            "and three readiness probes, during which it is not ready either."
        ),
    )
    reschedule_timeout_s: PositiveFloat = Field(
        1800.0, description="Seconds that a trainer whose pods are being rescheduled is waited for at the start."
    )
    request_timeout_s: PositiveFloat = Field(10.0, description="Seconds for one request to the Kubernetes API.")


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: RewardSection = Field(default_factory=RewardSection)
    grpo: GrpoSection = Field(default_factory=GrpoSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
