"""From a model spec and settings to megatron-core objects: config, model chunk, DDP, AdamW."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from servicekit.errors import ConfigError
from tandem_config.schema import TrainerSection
from trainer_service.megatron_engine import ON_CPU
from trainer_service.megatron_engine.layer_spec import decoder_spec
from weightsync.layout import Parallel
from weightsync.megatron_layout import padded_vocabulary
from weightsync.model_spec import ModelSpec


def initialize_parallel(parallel: Parallel, seed: int) -> None:
    """Megatron's process groups and random states; torch.distributed is initialised already.

    Raises: ConfigError: the sizes do not multiply to the world size.
    """
    world_size = torch.distributed.get_world_size()
    if parallel.world_size != world_size:
        raise ConfigError(
            f"trainer.tensor_parallel {parallel.tensor} x pipeline_parallel {parallel.pipeline} x data_parallel "
            f"{parallel.data} needs {parallel.world_size} ranks, WORLD_SIZE is {world_size}"
        )
    parallel_state.initialize_model_parallel(parallel.tensor, parallel.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _leave_uninitialised(weight: torch.Tensor) -> None:
    """Every parameter is read from files. (perform_initialization=False would also skip mcore's marking of
    tensor-parallel weights, and its gradient norm would then count the shards of rank 0 only.)"""


def _finalize_without_scaling(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """mcore's own gradient reduction. Our loss holds the global denominators, so there is nothing left to divide by."""
    finalize_model_grads(model, None, **kwargs)


def transformer_config(
    spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, sequence_parallel: bool
) -> TransformerConfig:
    """The model as megatron-core describes it; no option needs TransformerEngine or Apex."""
    return TransformerConfig(
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
        pipeline_model_parallel_size=parallel.pipeline,
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
        batch_p2p_sync=False,
        variable_seq_lengths=True,
        # mcore refuses variable_seq_lengths with the default dispatcher, even for a dense model
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_without_scaling,
    )


def build_model(spec: ModelSpec, config: TransformerConfig, device: torch.device) -> GPTModel:
    """This rank's part of the model; its parameters hold no values yet."""
    model = GPTModel(
        config,
        decoder_spec(config),
        vocab_size=padded_vocabulary(spec, config.tensor_model_parallel_size),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model.to(device)


def wrap(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """Gradient buffers and their reduction over data-parallel ranks."""
    module = Float16Module(config, model) if config.bf16 else model
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=module)


def build_optimizer(
    wrapped: DistributedDataParallel, config: TransformerConfig, settings: TrainerSection
) -> MegatronOptimizer:
    """AdamW; each step sets its step size; norms and biases have no weight decay, as mcore has it by default."""
    return get_megatron_optimizer(
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
        ),
        [wrapped],
    )
