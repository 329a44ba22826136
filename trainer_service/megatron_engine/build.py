"""Builds megatron-core objects from a model spec and settings: config, model chunks, DDP, AdamW, what is offloaded."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from servicekit.errors import ConfigError
from tandem_config.schema import OffloadSection, TrainerSection
from trainer_service.checkpoints.files import EXPERTS
from trainer_service.megatron_engine import ON_CPU
from trainer_service.megatron_engine.head.policy_model import PolicyModel
from trainer_service.megatron_engine.layer_spec import Modules, decoder_spec
from trainer_service.step.agreement import WAIT_S, RankAgreement
from trainer_service.step.offload import EngineState, Offload
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import padded_vocabulary
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.rope import RopeScaling
from weightsync.model.spec import ModelSpec


def initialize_parallel(parallel: Parallel, seed: int, timeout_s: float) -> None:
    """Initialise Megatron's process groups and random states; torch.distributed must be initialised before.

    Args:
        timeout_s: of collectives (trainer.collective_timeout_s), the only way for NCCL to notice a killed peer.

    Raises: ConfigError: the sizes do not multiply to the world size.
    """
    world_size = torch.distributed.get_world_size()
    if parallel.world_size != world_size:
        raise ConfigError(
            f"trainer.tensor_parallel {parallel.tensor} x pipeline_parallel {parallel.pipeline} x data_parallel "
            f"{parallel.data} x context_parallel {parallel.context} needs {parallel.world_size} ranks, WORLD_SIZE is "
            f"{world_size}"
        )
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        _virtual(parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def outcome_group() -> torch.distributed.ProcessGroup:
    """Make the group over which ranks agree on what they do alone, whatever the device."""
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
    if group is None:
        raise RuntimeError("torch.distributed made no group for outcomes")
    return group


def destroy_parallel() -> None:
    """Destroy Megatron's process groups: 20, with three threads each on gloo. megatron-core only forgets most of them.

    Each rank does so by itself; nothing of theirs may be under way.
    """
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # None is the world, which is not Megatron's
            torch.distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _virtual(parallel: Parallel) -> int | None:
    """Return the virtual stages in mcore's form: None for none, which is not the same as 1."""
    return parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None


def _leave_uninitialised(weight: torch.Tensor) -> None:
    """Initialise nothing, because every parameter is read from files.

    perform_initialization=False would also skip mcore's marking of tensor-parallel weights, and its gradient norm would
    then count the shards of rank 0 only.
    """


def _finalize_without_scaling(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients as mcore does, without its division: the loss has the global denominators already."""
    finalize_model_grads(model, None, **kwargs)


def transformer_config(
    spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, sequence_parallel: bool, **options: Any
) -> TransformerConfig:
    """Make megatron-core's description of the model; nothing here needs TransformerEngine or Apex.

    Args:
        options: further arguments of it.
    """
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=ON_CPU,
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        variable_seq_lengths=True,
        # mcore refuses variable_seq_lengths with the default dispatcher, even for a dense model
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_without_scaling,
        **(_pipeline(parallel) | (_mixture(spec, parallel) if spec.num_experts > 0 else {}) | options),
    )
    for name, value in _yarn(spec.rope_scaling).items():
        setattr(config, f"yarn_{name}", value)
    return config


def _pipeline(parallel: Parallel) -> dict[str, Any]:
    """Make the options of the pipeline: how layers are divided among stages, and how these pass activations on."""
    return {
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": _virtual(parallel),
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers if parallel.first_stage_layers > 0 else None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers if parallel.last_stage_layers > 0 else None,
        "account_for_embedding_in_pipeline_split": parallel.embedding_counts,
        "account_for_loss_in_pipeline_split": parallel.loss_counts,
        # With virtual stages, mcore's batched sends and receives between two stages pair up wrongly, without an error:
        # the previous and the next rank are the same one.
        "batch_p2p_comm": parallel.virtual_pipeline == 1,
        "overlap_p2p_comm": parallel.virtual_pipeline > 1,
        "batch_p2p_sync": False,
    }


def _yarn(scaling: RopeScaling | None) -> dict[str, Any]:
    """Make YaRN's constants, which mcore's embedding and attention read from attributes that no argument sets."""
    if scaling is None or scaling.kind != "yarn":
        return {}  # attention multiplies by YaRN's factor wherever the attributes are there
    return {
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "correction_range_round_to_int": scaling.truncate,
    }


def _rotary(spec: ModelSpec) -> dict[str, Any]:
    """Make the options of the rotary embeddings: each scaling is one that mcore has."""
    scaling = spec.rope_scaling
    options = {
        "position_embedding_type": "rope",
        "rotary_base": spec.rope_theta,
        "rope_scaling": spec.rope_factor != 1.0,
        "rope_scaling_factor": spec.rope_factor,
    }
    if scaling is None:
        return options
    if scaling.kind == "yarn":
        return options | {"position_embedding_type": "yarn"}
    if scaling.kind == "linear":
        return options | {"seq_len_interpolation_factor": scaling.factor}
    return options | {"rotary_base": scaling.dynamic_theta(spec.rope_theta, spec.head_dim)}


def _mixture(spec: ModelSpec, parallel: Parallel) -> dict[str, Any]:
    """Make the options of a mixture of experts: no token is dropped, and there is no load-balancing loss.

    The gate's product is computed in the parameters' type, and experts are chosen by float32 probabilities
    (layer_spec.Float32Router), as in transformers and SGLang; else trainer and engine would choose different experts.
    """
    return {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.expert_ffn_size,
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
        # softmax over the chosen experts is the softmax over all, renormalised
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def build_chunks(
    spec: ModelSpec,
    config: TransformerConfig,
    temperature: float,
    device: torch.device,
    modules: Modules = "torch",
) -> list[PolicyModel]:
    """Build this rank's part of the model, one module per virtual stage; its parameters have no values yet."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    return [_build_chunk(spec, config, temperature, device, stage, modules) for stage in stages]


def _build_chunk(
    spec: ModelSpec,
    config: TransformerConfig,
    temperature: float,
    device: torch.device,
    stage: int | None,
    modules: Modules,
) -> PolicyModel:
    model = PolicyModel(
        config,
        decoder_spec(config, stage, modules),
        vocab_size=padded_vocabulary(spec, config.tensor_model_parallel_size),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=spec.tied,
        **_rotary(spec),
        vp_stage=stage,
        true_vocab=spec.vocab_size,
        temperature=temperature,
    )
    model.model_type = ModelType.encoder_or_decoder
    for name, parameter in named_parameters([model], spec).items():
        if EXPERTS in name:
            # mcore marks experts so only under expert parallelism; without it and with another tensor-parallel size
            # than the rest of the layer, it would reduce their gradients over the wrong ranks
            parameter.allreduce = False
    model.to(device)
    return model


def named_parameters(chunks: Sequence[torch.nn.Module], spec: ModelSpec) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of all chunks, by their names in weightsync.layouts.megatron.

    TransformerEngine's modules have others, among them experts', by which shard files and process groups are chosen.
    """
    own = {
        (f"chunk{index}.{name}" if index > 0 else name): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return dict(in_local_spelling(spec, own))


def wrap(
    chunks: Sequence[PolicyModel], config: TransformerConfig, settings: TrainerSection
) -> list[DistributedDataParallel]:
    """Add buffers of gradients (and of parameters, for ZeRO-1) and their reduction over data-parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
        bucket_size=settings.ddp_bucket_size,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=Float16Module(config, model) if config.bf16 else model,
            # the first chunk alone communicates while others wait for it
            disable_bucketing=index > 0,
        )
        for index, model in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        # else the gradients of every micro-batch would be reduced, not their sum
        without = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = without if len(without) > 1 else without[0]
    return wrapped


def build_optimizer(
    wrapped: list[DistributedDataParallel], config: TransformerConfig, settings: TrainerSection
) -> ChainedOptimizer:
    """Build AdamW, whose step size is set in each step; norms and biases have no weight decay."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.distributed_optimizer,
            overlap_param_gather=settings.overlap_param_gather,
        ),
        wrapped,
    )
    for group in optimizer.param_groups:
        # mcore only marks the group; its OptimizerParamScheduler, which we do not use, would multiply.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    _use_one_kernel(optimizer)
    return optimizer


def _use_one_kernel(optimizer: ChainedOptimizer) -> None:
    """Let torch's AdamW update a tensor in one pass.

    Its default takes five times as long on a CPU, and on a GPU as much memory as its float32 parameters.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def layer_options(trainer: TrainerSection, num_layers: int) -> dict[str, Any]:
    """Make the arguments of TransformerConfig that say how layers compute, and what their backward pass computes again.

    Args:
        num_layers: of the model; more than a chunk has means all of the chunk's.
    """
    options: dict[str, Any] = {"moe_grouped_gemm": trainer.moe_grouped_gemm}
    if trainer.recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": list(trainer.recompute_modules)}
    if trainer.recompute == "full":
        layers = num_layers if trainer.recompute_layers is None else trainer.recompute_layers
        # one checkpoint per layer: a checkpoint of several would hold the activations of them all together
        options |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    return options


def build_offload(
    settings: OffloadSection,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    device: torch.device,
    folder: Path | None,
    agreement: RankAgreement,
) -> Offload:
    """Set up what is offloaded; AdamW's state must be filled in (AdamState).

    Args:
        folder: of files that hold a CPU's bytes; None: the folder of temporary files.
    Raises: ConfigError: the host has no room.
    """
    offload = Offload(device, folder, agreement)
    parameters = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
    if settings.parameters:
        offload.add(EngineState.PARAMETERS, parameters)
    if settings.gradients:
        # every update begins with zeros
        buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        offload.add(EngineState.GRADIENTS, [buffer.grad_data for buffer in buffers], keep=False)
    if settings.optimizer:
        # float32 parameters are AdamW's own: they are the state above
        offload.add(EngineState.OPTIMIZER, _optimizer_tensors(optimizer), beside=parameters)
    return offload


def _optimizer_tensors(optimizer: ChainedOptimizer) -> list[Tensor]:
    """Return what AdamW holds: masters and moments; step counts, a few bytes which are read at any time, are not."""
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    masters = [master.data for part in parts for group in part.param_groups for master in group["params"]]
    states = [value for part in parts for state in part.state.values() for value in state.values()]
    return [tensor for tensor in [*masters, *states] if isinstance(tensor, Tensor) and tensor.dim() > 0]
