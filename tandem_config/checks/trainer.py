"""Checks of the trainer's parallel sizes and of Megatron's options."""

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check("trainer.sequence_parallel", "trainer.tensor_parallel")
def _sequence_parallel_needs_tensor_parallel(config: RunConfig) -> Problems:
    if config.trainer.sequence_parallel and config.trainer.tensor_parallel == 1:
        yield problem(
            "trainer.sequence_parallel",
            "true",
            "splits activations over the tensor-parallel ranks, but trainer.tensor_parallel is 1",
            "set trainer.tensor_parallel: 2 or more, or trainer.sequence_parallel: false",
        )


@check(
    "trainer.pipeline_parallel",
    "trainer.virtual_pipeline",
    "trainer.first_stage_layers",
    "trainer.last_stage_layers",
    "trainer.embedding_counts",
    "trainer.loss_counts",
)
def _splits_need_a_pipeline(config: RunConfig) -> Problems:
    trainer = config.trainer
    uneven = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(trainer, name) is not None]
    counted = [name for name in ("embedding_counts", "loss_counts") if getattr(trainer, name)]
    splits = [*uneven, *counted, *(["virtual_pipeline"] if trainer.virtual_pipeline > 1 else [])]
    if splits and trainer.pipeline_parallel == 1:
        yield problem(
            f"trainer.{splits[0]}",
            str(getattr(trainer, splits[0])).lower(),
            "divides layers among pipeline stages, but trainer.pipeline_parallel is 1",
            f"set trainer.pipeline_parallel: 2 or more, or leave trainer.{splits[0]} out",
        )
    elif uneven and counted:
        yield problem(
            f"trainer.{uneven[0]}",
            getattr(trainer, uneven[0]),
            f"and trainer.{counted[0]} are two ways to divide the layers unequally",
            "use one of them",
        )


@check(
    "trainer.tensor_parallel",
    "trainer.data_parallel",
    "trainer.context_parallel",
    "trainer.expert_parallel",
    "trainer.expert_tensor_parallel",
)
def _experts_divide_a_stage(config: RunConfig) -> Problems:
    trainer = config.trainer
    ranks = trainer.world_size // trainer.pipeline_parallel
    sharers = trainer.expert_parallel * trainer.expert_tensor_parallel
    if ranks % sharers != 0:
        fits = [str(n) for n in range(1, ranks + 1) if ranks % (n * trainer.expert_tensor_parallel) == 0]
        yield problem(
            "trainer.expert_parallel",
            trainer.expert_parallel,
            f"x expert_tensor_parallel {trainer.expert_tensor_parallel} does not divide the {ranks} ranks of a "
            f"pipeline stage (tensor_parallel x context_parallel x data_parallel)",
            f"expert_parallel that fits: {', '.join(fits)}" if fits else "lower trainer.expert_tensor_parallel",
        )


@check("trainer.recompute", "trainer.recompute_modules", "trainer.recompute_layers")
def _recompute_reads_its_settings(config: RunConfig) -> Problems:
    trainer = config.trainer
    if trainer.recompute == "selective" and not trainer.recompute_modules:
        yield problem(
            "trainer.recompute_modules",
            "[]",
            "names nothing for trainer.recompute: selective to compute again",
            "core_attn, mlp, moe, or trainer.recompute: none",
        )
        return
    readers = {"recompute_modules": "selective", "recompute_layers": "full"}
    for name, mode in readers.items():
        value = getattr(trainer, name)
        if trainer.recompute != mode and value != type(trainer).model_fields[name].default:
            yield problem(
                f"trainer.{name}",
                str(value) if isinstance(value, int) else f"[{', '.join(value)}]",
                f"counts with trainer.recompute: {mode}, and that is {trainer.recompute}",
                f"set trainer.recompute: {mode}, or leave trainer.{name} out",
            )
            return


_COPIES = ("trainer.data_parallel", "trainer.context_parallel")


@check("trainer.distributed_optimizer", "trainer.overlap_grad_reduce", *_COPIES)
def _copies_to_divide_among(config: RunConfig) -> Problems:
    trainer = config.trainer
    asked = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if getattr(trainer, name)]
    if asked and trainer.data_parallel * trainer.context_parallel == 1:
        yield problem(
            f"trainer.{asked[0]}",
            "true",
            "works among ranks that hold the same parameters, and trainer.data_parallel x context_parallel is 1",
            f"set trainer.data_parallel: 2 or more, or trainer.{asked[0]}: false",
        )


@check("trainer.distributed_optimizer", "trainer.overlap_grad_reduce", "trainer.overlap_param_gather")
def _gathering_needs_parts_and_buckets(config: RunConfig) -> Problems:
    trainer = config.trainer
    needed = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(trainer, name)]
    why = {
        "distributed_optimizer": "parameters are gathered only where an optimizer divides them",
        "overlap_grad_reduce": "without it Megatron makes one bucket of all parameters, which nothing can overlap",
    }
    if needed and trainer.overlap_param_gather:
        yield problem(
            "trainer.overlap_param_gather",
            "true",
            f"needs trainer.{needed[0]}: {why[needed[0]]}",
            f"set {' and '.join(f'trainer.{name}: true' for name in needed)}, or trainer.overlap_param_gather: false",
        )


@check("trainer.ddp_bucket_size", "trainer.overlap_grad_reduce")
def _buckets_are_of_overlaps(config: RunConfig) -> Problems:
    trainer = config.trainer
    if trainer.ddp_bucket_size is not None and not trainer.overlap_grad_reduce:
        yield problem(
            "trainer.ddp_bucket_size",
            trainer.ddp_bucket_size,
            "counts with trainer.overlap_grad_reduce: true only; without it there is one bucket",
            "set trainer.overlap_grad_reduce: true, or leave trainer.ddp_bucket_size out",
        )


@check("trainer.moe_grouped_gemm", "trainer.layer_spec")
def _grouped_experts_need_their_layers(config: RunConfig) -> Problems:
    if config.trainer.moe_grouped_gemm and config.trainer.layer_spec == "torch":
        yield problem(
            "trainer.moe_grouped_gemm",
            "true",
            "is TransformerEngine's, and trainer.layer_spec is torch",
            "set trainer.layer_spec: transformer_engine, or leave trainer.moe_grouped_gemm out",
        )
