"""The trainer: parallel sizes, optimizer, micro-batches."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem_config.sections.base import ListOf, PositiveFloat, PositiveInt, Section, about


class OffloadSection(Section):
    """What of the trainer's memory goes to the host while it is not used, and comes back bitwise."""

    parameters: bool = Field(
        False,
        description=(
            "The weights, and those of the reference policy: on the device in train steps, log-probs, weight syncs, "
            "exports and checkpoints only."
        ),
        json_schema_extra=about("a device of its own needs no room for others"),
    )
    gradients: bool = Field(
        False,
        description="Gradient buffers: there in train steps only; nothing is copied, they are made anew.",
        json_schema_extra=about("a device of its own needs no room for others"),
    )
    optimizer: bool = Field(
        False,
        description=(
            "AdamW's moments, and the float32 masters of bfloat16 parameters: on the device in train steps and "
            "checkpoints only."
        ),
        json_schema_extra=about("a device of its own needs no room for others"),
    )


class TrainerSection(Section):
    """The Megatron trainer service."""

    tensor_parallel: PositiveInt = Field(
        1,
        description="Ranks that share each layer.",
        json_schema_extra=about("a small model needs no more than one device", unit="ranks"),
    )
    pipeline_parallel: PositiveInt = Field(
        1,
        description="Stages that share the layers.",
        json_schema_extra=about("a small model needs no more than one device", unit="ranks"),
    )
    data_parallel: PositiveInt = Field(
        1,
        description="Copies of the model, each with its share of every batch.",
        json_schema_extra=about("a small model needs no more than one device", unit="ranks"),
    )
    sequence_parallel: bool = Field(
        False,
        description=(
            "Split activations between layers over the tensor-parallel ranks; a mixture of experts with tensor "
            "parallelism needs it."
        ),
        json_schema_extra=about("saves memory for long sequences, from tensor_parallel 2"),
    )
    context_parallel: PositiveInt = Field(
        1,
        description="Ranks that share the tokens of each sequence.",
        json_schema_extra=about("for sequences that one device cannot hold", unit="ranks"),
    )
    expert_parallel: PositiveInt = Field(
        1,
        description="Ranks that share the experts of a layer; they are ranks of the same stage, not additional ones.",
        json_schema_extra=about("dense models have no experts", unit="ranks"),
    )
    expert_tensor_parallel: PositiveInt = Field(
        1,
        description="Ranks that share each expert, as tensor_parallel does for the rest of a layer.",
        json_schema_extra=about("experts are small; splitting them costs messages", unit="ranks"),
    )
    virtual_pipeline: PositiveInt = Field(
        1,
        description="Chunks of layers per pipeline stage, run in turns: less idle time, more messages.",
        json_schema_extra=about("it helps only with several pipeline stages", unit="chunks"),
    )
    first_stage_layers: PositiveInt | None = Field(
        None,
        description="Layers of the first pipeline stage; null: as many as the others.",
        json_schema_extra=about("an equal share, where the number of layers allows it", unit="layers"),
    )
    last_stage_layers: PositiveInt | None = Field(
        None,
        description="Layers of the last pipeline stage; null: as many as the others.",
        json_schema_extra=about("an equal share, where the number of layers allows it", unit="layers"),
    )
    embedding_counts: bool = Field(
        False,
        description="Count the embedding as a layer when layers are assigned to pipeline stages.",
        json_schema_extra=about("as Megatron's default"),
    )
    loss_counts: bool = Field(
        False,
        description="Count output layer and loss as a layer when layers are assigned to pipeline stages.",
        json_schema_extra=about("as Megatron's default"),
    )
    learning_rate: PositiveFloat = Field(
        1e-6,
        description="AdamW step size at its highest.",
        json_schema_extra=about("usual for RL on a trained model; the example needs more", unit="per update"),
    )
    learning_rate_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How the step size falls over run.iterations: not at all, or to near 0 at the end.",
        json_schema_extra=about("the length of an RL run is seldom known in advance"),
    )
    warmup_iterations: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Iterations over which the step size rises to its highest.",
        json_schema_extra=about("clip_grad bounds the first steps already", unit="iterations"),
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="AdamW decoupled weight decay.",
        json_schema_extra=about("pulls the policy away from its start, which RL does not want", unit="per update"),
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="AdamW first-moment decay.", json_schema_extra=about("AdamW's usual value")
    )
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="AdamW second-moment decay.", json_schema_extra=about("AdamW's usual value")
    )
    adam_eps: PositiveFloat = Field(
        1e-8, description="AdamW denominator floor.", json_schema_extra=about("AdamW's usual value")
    )
    clip_grad: PositiveFloat = Field(
        1.0, description="Largest global gradient norm.", json_schema_extra=about("the usual value", unit="norm")
    )
    max_tokens_per_micro_batch: PositiveInt = Field(
        16384,
        description="Tokens of one micro-batch, packed into one row; bounds activation memory.",
        json_schema_extra=about("several long samples; raise it as far as memory allows", unit="tokens"),
    )
    layer_spec: Literal["auto", "torch", "transformer_engine"] = Field(
        "torch",
        description=(
            "Modules of the layers: torch's own, or TransformerEngine's fused ones; auto: the latter where it is "
            "installed. Attention within packed rows is the same."
        ),
        json_schema_extra=about("needs nothing but torch; TransformerEngine's have not been run on a GPU yet"),
    )
    moe_grouped_gemm: bool = Field(
        False,
        description="Compute the experts of a layer in one grouped product: TransformerEngine's, with its layer_spec.",
        json_schema_extra=about("torch's layers compute one expert after the other"),
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description=(
            "Activations that the backward pass computes again instead of keeping them. selective: those of "
            "recompute_modules in every layer; full: whole layers, of which only the input is kept."
        ),
        json_schema_extra=about("costs nothing; full costs a forward pass more, a third of the time of an update"),
    )
    recompute_modules: ListOf[Literal["core_attn", "mlp", "moe"]] = Field(
        ("core_attn",),
        description=(
            "What selective recompute leaves out, by Megatron's names: core_attn, mlp (of dense layers), moe (experts "
            "and router). Its layernorm needs TransformerEngine, and is not offered."
        ),
        json_schema_extra=about("as Megatron's; a fused attention kernel keeps little, mlp or moe the most of a layer"),
    )
    recompute_layers: PositiveInt | None = Field(
        None,
        description="Layers of each stage (or of each of its virtual chunks) that full recompute covers; null: all.",
        json_schema_extra=about("least memory; fewer where there is memory left", unit="layers"),
    )
    distributed_optimizer: bool = Field(
        False,
        description=(
            "Divide AdamW's moments and float32 masters among the ranks that hold the same parameters (ZeRO-1): "
            "data_parallel x context_parallel of them."
        ),
        json_schema_extra=about("with one copy of the model there is nothing to divide"),
    )
    overlap_grad_reduce: bool = Field(
        False,
        description="Reduce gradients over data-parallel ranks during the backward pass.",
        json_schema_extra=about("with one copy of the model there is nothing to reduce"),
    )
    overlap_param_gather: bool = Field(
        False,
        description=(
            "Gather parameters after an update of distributed_optimizer during the next forward pass; needs "
            "overlap_grad_reduce too. The last update of an iteration is waited for before weights are used elsewhere."
        ),
        json_schema_extra=about("with one copy of the model there is nothing to gather"),
    )
    ddp_bucket_size: PositiveInt | None = Field(
        None,
        description="Parameters that the overlaps reduce or gather at a time; null: 40 million, or a million a rank.",
        json_schema_extra=about("as Megatron's: large enough for a network's bandwidth", unit="parameters"),
    )
    share_prompts: bool = Field(
        False,
        description="Compute a prompt once for all of its completions in a micro-batch, instead of once for each.",
        json_schema_extra=about("prompts that are short beside their completions gain little"),
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        description=(
            "Highest speed of a rank's device in the model's type, which the model-FLOPs utilisation is a share of; "
            "null: a matrix product is measured before the first step."
        ),
        json_schema_extra=about("data sheets promise what no program reaches", unit="10^12 FLOP/s"),
    )
    collective_timeout_s: PositiveFloat = Field(
        300.0,
        description=(
            "Seconds until a trainer collective fails because a peer does not take part. Ranks that read or write "
            "files are waited for as long as the call may take, half an hour."
        ),
        json_schema_extra=about("longer than any work between two collectives of a step", unit="s"),
    )
    initial_checkpoint: Path | None = Field(
        None,
        description=(
            "Trainer checkpoint whose weights a new run starts from, instead of those of model.path: a folder of "
            "`tandem import`, or trainer/ in a checkpoint of a run of the same model, of any parallel sizes. A "
            "reference policy is still model.path's (grpo.reference_path). null: those of model.path."
        ),
        json_schema_extra=about("model.path has the weights"),
    )
    checkpoint_optimizer: bool = Field(
        True,
        description=(
            "Keep AdamW's state and float32 masters in checkpoints. false: a checkpoint is a third of the size "
            "(bfloat16: a seventh), and a resume starts AdamW anew."
        ),
        json_schema_extra=about("a resume then equals the undisturbed run"),
    )
    checkpoint_extra: bool = Field(
        True,
        description=(
            "Keep random states and the numbers of steps done and updates skipped in checkpoints. false: a resume "
            "starts the learning-rate schedule, grpo.reference_refresh_every and grpo.non_finite_budget anew."
        ),
        json_schema_extra=about("a resume then equals the undisturbed run"),
    )
    offload: OffloadSection = Field(
        default_factory=OffloadSection,
        description=(
            "What of the trainer's memory is free while it is not used, for a device that others use as well. Its "
            "bytes go to page-locked host memory, those of a trainer on CPUs to a file in the run's folder."
        ),
        json_schema_extra=about("moving it back and forth takes time in every step and weight sync"),
    )

    @property
    def world_size(self) -> int:
        """Number of trainer ranks; expert parallelism and virtual stages use the same ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def parallel_sizes(self) -> dict[str, Any]:
        """Arguments of weightsync.layouts.layout.Parallel, which this package does not import."""
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
