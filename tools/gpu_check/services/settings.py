"""What the fleets of services are: sizes by device, a random model made on the spot, the configuration, the GPUs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.run.devices import DevicePlan
from tandem_config.schema import RunConfig

RUN_ID = "gpu-check"
LEASE_TTL_S = 5.0
# The smallest that there is: a transfer of many messages, in the middle of which a rank can be harmed.
BUCKET_MIB = 2**-8
PROMPT_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large things are on a device.

    Attributes:
        logprob_limit: largest |log-prob of the rollout - log-prob of the trainer| of a token, in nats.
        logprob_mean_limit: their mean.
        odd_experts: share of a mixture's tokens that may be further apart: rounding makes the two sides choose other
            experts for them.
        long_completion: tokens of a completion in the middle of which weights change.
        resume_limit: largest |difference| / |update| of two steps after a resume; 0: bitwise equal.
        layout_limit: the same of two steps of other parallel sizes and options than one rank without any.
    """

    device: Literal["cuda", "cpu"]
    dtype: Literal["float32", "bfloat16"]
    layers: int
    hidden: int
    head_dim: int
    vocabulary: int
    logprob_limit: float
    logprob_mean_limit: float
    odd_experts: float
    long_completion: int
    resume_limit: float
    layout_limit: float


# The limits of bfloat16 are at least twice what these models showed on CPUs. On GPUs some sums are done in another
# order each time (atomic additions in backward passes); with an optimizer that forgot how many updates it had made, the
# difference was 0.37 of the update (on CPUs).
SCALES = {
    "cuda": Scale(
        device="cuda",
        dtype="bfloat16",
        layers=4,
        hidden=512,
        head_dim=64,
        vocabulary=8000,
        logprob_limit=0.2,
        logprob_mean_limit=0.03,
        odd_experts=0.15,
        long_completion=1500,
        resume_limit=0.02,
        layout_limit=0.5,
    ),
    "cpu": Scale(
        device="cpu",
        dtype="float32",
        layers=2,
        hidden=128,
        head_dim=16,
        vocabulary=1001,
        logprob_limit=1e-4,
        logprob_mean_limit=1e-5,
        odd_experts=0.0,
        long_completion=300,
        resume_limit=0.0,
        layout_limit=1e-4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One fleet: a trainer and replicas of one size.

    experts: a mixture of so many experts a layer, spread over the ranks of either side; 0: a dense model.
    replicas: 0: a trainer alone.
    data, context: the trainer's other parallel sizes.
    sections: changes of the configuration's sections.
    """

    name: str
    tensor: int = 2
    rollout_tensor: int = 2
    replicas: int = 1
    experts: int = 0
    data: int = 1
    context: int = 1
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gpus: Sequence[str] = field(default=())

    @property
    def trainer_ranks(self) -> int:
        """GPUs of the trainer."""
        return self.tensor * self.data * self.context

    @property
    def num_ranks(self) -> int:
        """GPUs that it needs, one per rank."""
        return self.trainer_ranks + self.rollout_tensor * self.replicas

    def devices(self, scale: Scale) -> DevicePlan:
        """Which process sees which GPUs; on CPUs none sees any. Fewer GPUs than ranks: all of them share the first."""
        gpus = list(self.gpus) if scale.device == "cuda" else [""] * self.num_ranks
        gpus = gpus if len(gpus) >= self.num_ranks else [gpus[0]] * self.num_ranks
        at = [self.trainer_ranks + self.rollout_tensor * replica for replica in range(self.replicas)]
        return DevicePlan(
            available=self.num_ranks,
            needed=self.num_ranks,
            trainer=_listed(gpus[: self.trainer_ranks]),
            # one that is not started has none
            rollouts=tuple(_listed(gpus[start : start + self.rollout_tensor]) for start in at) or ("",),
        )


def _listed(gpus: Sequence[str]) -> str:
    return ",".join(gpu for gpu in gpus if gpu)


def run_config(shape: Shape, scale: Scale, model: Path) -> RunConfig:
    """The configuration of every process of a fleet."""
    spread = shape.experts > 0 and shape.tensor > 1
    trainer: dict[str, Any] = {
        "tensor_parallel": shape.tensor,
        "data_parallel": shape.data,
        "context_parallel": shape.context,
        "learning_rate": 5e-3,  # so that one step changes every log-prob by far more than the limit
        "collective_timeout_s": 60.0,
        "sequence_parallel": spread,
        "expert_parallel": shape.tensor if spread else 1,
        "max_tokens_per_micro_batch": 2048,
    }
    rollout: dict[str, Any] = {
        "tensor_parallel": shape.rollout_tensor,
        "expert_parallel": shape.rollout_tensor if shape.experts > 0 else 1,
        "replicas": max(1, shape.replicas),
        "max_total_tokens": 16384,
        "mem_fraction_static": 0.3,
        "max_running_requests": 64,
    }
    sync: dict[str, Any] = {
        "bucket_mib": BUCKET_MIB,
        "transport": "collective",
        "allow_staged_nccl": True,  # nothing is generated beside the staged rounds here
        "formation_timeout_s": 60.0,
        "transfer_timeout_s": 60.0,
        "probe_timeout_s": 5.0,
        "lease_ttl_s": LEASE_TTL_S,
    }
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": RUN_ID},
        "model": {"path": model, "dtype": scale.dtype},
        "data": {"train": model / "unused.jsonl", "max_prompt_tokens": 256},
        "grpo": {"prompts_per_iteration": 8, "group_size": 2, "max_new_tokens": scale.long_completion},
        "trainer": trainer,
        "rollout": rollout,
        "sync": sync,
    }
    changed = {name: {**sections.get(name, {}), **changes} for name, changes in shape.sections.items()}
    return RunConfig.model_validate(sections | changed)


def model_config(scale: Scale, experts: int) -> dict[str, Any]:
    """config.json of a tiny Qwen3, dense or a mixture."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": scale.layers,
        "hidden_size": scale.hidden,
        "intermediate_size": 2 * scale.hidden,
        "num_attention_heads": scale.hidden // scale.head_dim,
        "num_key_value_heads": scale.hidden // scale.head_dim // 2,
        "head_dim": scale.head_dim,
        "vocab_size": scale.vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,  # a completion ends where a check says
        "torch_dtype": "float32",
    }
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": scale.hidden // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config | mixture if experts > 0 else config


def write_model(config: Mapping[str, Any], folder: Path) -> Path:
    """A Hugging Face folder of random float32 weights, norms included, so that a weight that was missed shows."""
    import torch
    from safetensors.torch import save_file

    from weightsync.layouts.hf import hf_layout
    from weightsync.model.spec import ModelSpec

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    layout = hf_layout(ModelSpec.from_folder(folder))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in zip(layout.params, layout.param_shapes, strict=True):
        values = torch.randn(tuple(shape), generator=generator)
        tensors[name] = 1 + 0.1 * values if "norm" in name else values * shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
