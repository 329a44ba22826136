"""Settings of `trainer` at which engines are compared: parallel sizes, and how optimizer and gradients are divided."""

from typing import Any

BUCKET = 4000  # parameters: several buckets in the smallest model
ZERO: dict[str, Any] = {"distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": BUCKET}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    # more ranks than KV heads, where the model has 2 (tp4) or 1 (tp2)
    "tp4": {"tensor_parallel": 4},
    "tp4-sequence": {"tensor_parallel": 4, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2},
    "pp4": {"pipeline_parallel": 4},
    "dp4": {"data_parallel": 4},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "pp2-virtual": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "tp2-pp2-virtual": {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": True},
    "pp2-first": {"pipeline_parallel": 2, "first_stage_layers": 1},
    "pp2-last": {"pipeline_parallel": 2, "last_stage_layers": 1},
    "pp2-embedding": {"pipeline_parallel": 2, "embedding_counts": True},
    "pp2-loss": {"pipeline_parallel": 2, "loss_counts": True},
    "pp2-virtual-both": {
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
        "embedding_counts": True,
        "loss_counts": True,
    },
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "etp2": {"data_parallel": 2, "expert_tensor_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "tp2-etp2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
    "ep2-pp2": {"data_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2},
    "ep2-pp2-virtual": {
        "data_parallel": 2,
        "expert_parallel": 2,
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
    },
    "tp2-dp2-ep2-etp2": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "data_parallel": 2,
        "expert_parallel": 2,
        "expert_tensor_parallel": 2,
    },
    "ep4": {"data_parallel": 4, "expert_parallel": 4},
    "tp2-dp2": {"tensor_parallel": 2, "data_parallel": 2},
    "pp2-dp2": {"pipeline_parallel": 2, "data_parallel": 2},
    "dp2-zero": ZERO | {"data_parallel": 2},
    "dp2-overlap": OVERLAP | {"data_parallel": 2},
    "dp2-reduce": {"data_parallel": 2, "overlap_grad_reduce": True, "ddp_bucket_size": BUCKET},
    "cp2-zero": ZERO | {"context_parallel": 2},
    "ep2-zero": ZERO | {"data_parallel": 2, "expert_parallel": 2},
    "etp2-overlap": OVERLAP | {"data_parallel": 2, "expert_tensor_parallel": 2},
    "tp2-dp2-overlap": OVERLAP | {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel": 2},
    "pp2-dp2-zero": ZERO | {"pipeline_parallel": 2, "data_parallel": 2},
    "pp2-dp2-overlap": OVERLAP | {"pipeline_parallel": 2, "virtual_pipeline": 2, "data_parallel": 2},
    "cp2": {"context_parallel": 2},
    "cp4": {"context_parallel": 4},
    "cp2-pp2": {"context_parallel": 2, "pipeline_parallel": 2},
    "cp2-ep2": {"context_parallel": 2, "expert_parallel": 2},
    "tp2-cp2": {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2},
    "dp2-cp2": {"data_parallel": 2, "context_parallel": 2},
    "cp2-pp2-virtual": {"context_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
}
