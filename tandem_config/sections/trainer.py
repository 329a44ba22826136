"""The trainer: parallel sizes, optimizer, micro-batches."""

from pathlib import Path
from typing import Any, Literal

from tandem_config.sections.base import ListOf, PositiveFloat, PositiveInt, Section, setting


class OffloadSection(Section):
    """What of the trainer's memory goes to the host while it is not used, and comes back bitwise."""

    parameters: bool = setting(False, "a device of its own needs no room for others")
    """The weights, and those of the reference policy: on the device in train steps, log-probs, weight syncs, exports
    and checkpoints only."""
    gradients: bool = setting(False, "a device of its own needs no room for others")
    """Gradient buffers: there in train steps only; nothing is copied, they are made anew."""
    optimizer: bool = setting(False, "a device of its own needs no room for others")
    """AdamW's moments, and the float32 masters of bfloat16 parameters: on the device in train steps and checkpoints
    only."""


class TrainerSection(Section):
    """The Megatron trainer service."""

    tensor_parallel: PositiveInt = setting(1, "a small model needs no more than one device", "ranks")
    """Ranks that share each layer."""
    pipeline_parallel: PositiveInt = setting(1, "a small model needs no more than one device", "ranks")
    """Stages that share the layers."""
    data_parallel: PositiveInt = setting(1, "a small model needs no more than one device", "ranks")
    """Copies of the model, each with its share of every batch."""
    sequence_parallel: bool = setting(False, "saves memory for long sequences, from tensor_parallel 2")
    """Split activations between layers over the tensor-parallel ranks; a mixture of experts with tensor parallelism
    needs it."""
    context_parallel: PositiveInt = setting(1, "for sequences that one device cannot hold", "ranks")
    """Ranks that share the tokens of each sequence."""
    expert_parallel: PositiveInt = setting(1, "dense models have no experts", "ranks")
    """Ranks that share the experts of a layer; they are ranks of the same stage, not additional ones."""
    expert_tensor_parallel: PositiveInt = setting(1, "experts are small; splitting them costs messages", "ranks")
    """Ranks that share each expert, as tensor_parallel does for the rest of a layer."""
    virtual_pipeline: PositiveInt = setting(1, "it helps only with several pipeline stages", "chunks")
    """Chunks of layers per pipeline stage, run in turns: less idle time, more messages."""
    first_stage_layers: PositiveInt | None = setting(
        None, "an equal share, where the number of layers allows it", "layers"
    )
    """Layers of the first pipeline stage; null: as many as the others."""
    last_stage_layers: PositiveInt | None = setting(
        None, "an equal share, where the number of layers allows it", "layers"
    )
    """Layers of the last pipeline stage; null: as many as the others."""
    embedding_counts: bool = setting(False, "as Megatron's default")
    """Count the embedding as a layer when layers are assigned to pipeline stages."""
    loss_counts: bool = setting(False, "as Megatron's default")
    """Count output layer and loss as a layer when layers are assigned to pipeline stages."""
    learning_rate: PositiveFloat = setting(
        1e-6, "usual for RL on a trained model; the example needs more", "per update"
    )
    """AdamW step size at its highest."""
    learning_rate_decay: Literal["constant", "linear", "cosine"] = setting(
        "constant", "the length of an RL run is seldom known in advance"
    )
    """How the step size falls over run.iterations: not at all, or to near 0 at the end."""
    warmup_iterations: int = setting(0, "clip_grad bounds the first steps already", "iterations", ge=0)
    """Iterations over which the step size rises to its highest."""
    weight_decay: float = setting(
        0.0, "pulls the policy away from its start, which RL does not want", "per update", ge=0
    )
    """AdamW decoupled weight decay."""
    adam_beta1: float = setting(0.9, "AdamW's usual value", ge=0, lt=1)
    """AdamW first-moment decay."""
    adam_beta2: float = setting(0.999, "AdamW's usual value", ge=0, lt=1)
    """AdamW second-moment decay."""
    adam_eps: PositiveFloat = setting(1e-8, "AdamW's usual value")
    """AdamW denominator floor."""
    clip_grad: PositiveFloat = setting(1.0, "the usual value", "norm")
    """Largest global gradient norm."""
    max_tokens_per_micro_batch: PositiveInt = setting(
        16384, "several long samples; raise it as far as memory allows", "tokens"
    )
    """Tokens of one micro-batch, packed into one row; bounds activation memory."""
    layer_spec: Literal["auto", "torch", "transformer_engine"] = setting(
        "torch", "needs nothing but torch; TransformerEngine's have not been run on a GPU yet"
    )
    """Modules of the layers: torch's own, or TransformerEngine's fused ones; auto: the latter where it is installed.
    Attention within packed rows is the same."""
    moe_grouped_gemm: bool = setting(False, "torch's layers compute one expert after the other")
    """Compute the experts of a layer in one grouped product: TransformerEngine's, with its layer_spec."""
    recompute: Literal["none", "selective", "full"] = setting(
        "none", "costs nothing; full costs a forward pass more, a third of the time of an update"
    )
    """Activations that the backward pass computes again instead of keeping them. selective: those of recompute_modules
    in every layer; full: whole layers, of which only the input is kept."""
    recompute_modules: ListOf[Literal["core_attn", "mlp", "moe"]] = setting(
        ("core_attn",), "as Megatron's; a fused attention kernel keeps little, mlp or moe the most of a layer"
    )
    """What selective recompute leaves out, by Megatron's names: core_attn, mlp (of dense layers), moe (experts and
    router). Its layernorm needs TransformerEngine, and is not offered."""
    recompute_layers: PositiveInt | None = setting(None, "least memory; fewer where there is memory left", "layers")
    """Layers of each stage (or of each of its virtual chunks) that full recompute covers; null: all."""
    distributed_optimizer: bool = setting(False, "with one copy of the model there is nothing to divide")
    """Divide AdamW's moments and float32 masters among the ranks that hold the same parameters (ZeRO-1): data_parallel
    x context_parallel of them."""
    overlap_grad_reduce: bool = setting(False, "with one copy of the model there is nothing to reduce")
    """Reduce gradients over data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = setting(False, "with one copy of the model there is nothing to gather")
    """Gather parameters after an update of distributed_optimizer during the next forward pass; needs
    overlap_grad_reduce too. The last update of an iteration is waited for before weights are used elsewhere."""
    ddp_bucket_size: PositiveInt | None = setting(
        None, "as Megatron's: large enough for a network's bandwidth", "parameters"
    )
    """Parameters that the overlaps reduce or gather at a time; null: 40 million, or a million a rank."""
    share_prompts: bool = setting(False, "prompts that are short compared with their completions gain little")
    """Compute a prompt once for all of its completions in a micro-batch, instead of once for each."""
    peak_tflops: PositiveFloat | None = setting(None, "data sheets promise what no program reaches", "10^12 FLOP/s")
    """Highest speed of a rank's device in the model's type, which the model-FLOPs utilisation is a share of; null: a
    matrix product is measured before the first step."""
    collective_timeout_s: PositiveFloat = setting(300.0, "longer than any work between two collectives of a step", "s")
    """Seconds until a trainer collective fails because a peer does not take part. Ranks that read or write files are
    waited for as long as the call may take, half an hour."""
    initial_checkpoint: Path | None = setting(None, "model.path has the weights")
    """Trainer checkpoint whose weights a new run starts from, instead of those of model.path: a folder of `tandem
    import`, or trainer/ in a checkpoint of a run of the same model, of any parallel sizes. A reference policy is still
    model.path's (grpo.reference_path). null: those of model.path."""
    checkpoint_optimizer: bool = setting(True, "a resume then equals the undisturbed run")
    """Keep AdamW's state and float32 masters in checkpoints. false: a checkpoint is a third of the size (bfloat16: a
    seventh), and a resume starts AdamW anew."""
    checkpoint_extra: bool = setting(True, "a resume then equals the undisturbed run")
    """Keep random states and the numbers of steps done and updates skipped in checkpoints. false: a resume starts the
    learning-rate schedule, grpo.reference_refresh_every and grpo.non_finite_budget anew."""
    offload: OffloadSection = setting(
        factory=OffloadSection, why="moving it back and forth takes time in every step and weight sync"
    )
    """What of the trainer's memory is free while it is not used, for a device that others use as well. Its bytes go to
    page-locked host memory, those of a trainer on CPUs to a file in the run's folder."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks; expert parallelism and virtual stages use the same ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def resumes_exactly(self) -> bool:
        """Whether a trainer that has loaded a checkpoint continues as the one that wrote it would have."""
        return self.checkpoint_optimizer and self.checkpoint_extra

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
