"""Ranks of SGLang engines on GPUs that are not there: the settings that SGLang comes to, and its parameters.

`python -m tests.cuda.sglang_rank CASES`, a JSON list of {capability, moe, tensor, expert, dtype, overrides, environ},
all of one capability; prints a line of JSON with an answer for each. SGLang itself resolves the settings and builds the
model; what it asks of the driver is answered here, parameters are on the CPU, and collectives are torch fakes.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.kernels import refuse_other_forms
from rollout_service.sglang_engine.options import engine_arguments
from rollout_service.sglang_engine.receiver import receivable_tensors
from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig

MEMORY_BYTES = 80 * 2**30
SETTINGS = (
    "attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "ep_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "page_size",
    "kv_cache_dtype",
    "quantization",
    "enable_fp32_lm_head",
    "enable_memory_saver",
    "enable_symm_mem",
    "enable_nccl_nvls",
    "max_total_tokens",
)
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "use_sliding_window": False,
}
# 192 / 2 is no multiple of 128: kernels that pad experts' sizes would show.
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def model_config(moe: bool) -> dict[str, Any]:
    """A Hugging Face config.json of Qwen3, dense or a mixture of experts."""
    if moe:
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_SIZES, **_EXPERTS}
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_SIZES}


class _Inert:
    """A stream or event of a device that is not there."""

    cuda_stream = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def pretend_gpu(capability: tuple[int, int]) -> None:
    """Answer what SGLang asks torch.cuda."""

    class Properties:
        total_memory = MEMORY_BYTES
        major, minor = capability
        name = {8: "NVIDIA A100-SXM4-80GB", 9: "NVIDIA H100 80GB HBM3", 10: "NVIDIA B200"}[capability[0]]
        multi_processor_count = 132
        uuid = "GPU-0"
        is_integrated = 0
        L2_cache_size = 50 * 2**20
        max_threads_per_multi_processor = 2048
        warp_size = 32
        shared_memory_per_block_optin = 232448

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *args: capability,
        "get_device_name": lambda *args: Properties.name,
        "get_device_properties": lambda *args: Properties,
        "mem_get_info": lambda *args: (MEMORY_BYTES, MEMORY_BYTES),
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "set_device": lambda *args: None,
        "Stream": _Inert,
        "Event": _Inert,
        "current_stream": lambda *args: _Inert(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def pretend_world(rank: int, world_size: int) -> None:
    """torch.distributed's groups are fake ones."""
    init, new_group = dist.init_process_group, dist.new_group

    def fake_init(*args: Any, **kwargs: Any) -> None:
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    dist.init_process_group = torch.distributed.init_process_group = fake_init
    dist.new_group = torch.distributed.new_group = fake_group


def resolve(case: dict[str, Any], folder: Path) -> Any:
    """SGLang's ServerArgs of the case, resolved by SGLang from what we hand to it."""
    (folder / "config.json").write_text(json.dumps(model_config(case["moe"])), encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": case["dtype"]},
            "data": {"train": "unused.jsonl"},
            "rollout": {"tensor_parallel": case["tensor"], "expert_parallel": case["expert"]},
        }
    )
    from sglang.srt.server_args import ServerArgs

    given = engine_arguments(config, "rollout-0", HostRanks(tensor_parallel=case["tensor"]), True)
    arguments = ServerArgs(**{**given, "disable_custom_all_reduce": True, **case["overrides"]})
    arguments.resolve_once()
    return arguments


def build_model(arguments: Any, rank: int) -> torch.nn.Module:
    """The rank's model as SGLang's loader leaves it, without weights in it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.models import qwen3, qwen3_moe  # noqa: F401  (SGLang looks for them before it loads them)
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=None))
    coordinator = parallel_state.GroupCoordinator.__init__

    def without_devices(self: Any, *args: Any, **kwargs: Any) -> None:
        off = {"use_pynccl": False, "use_custom_allreduce": False, "use_message_queue_broadcaster": False}
        coordinator(self, *args, **{**kwargs, **off})

    parallel_state.GroupCoordinator.__init__ = without_devices
    with FakeTensorMode(allow_non_fake_inputs=True):
        bootstrap._init_parallel_groups(backend="fake", dist_init_method="env://", server_args=arguments, gpu_id=rank)
    config = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=config)
    initialize_moe_config()
    with loader.set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model: torch.nn.Module = loader._initialize_model(config, LoadConfig(load_format="dummy"), None)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
    return model


def describe(case: dict[str, Any]) -> dict[str, Any]:
    """Settings, parameters {name: [shape, dtype]} of the last rank, and why we would refuse them (or null)."""
    rank = case["tensor"] - 1
    os.environ.update(case.get("environ", {}))
    pretend_world(rank, case["tensor"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = resolve(case, Path(folder))
        resolved = arguments.resolved_dict()
        model = build_model(arguments, rank)
    refused = None
    try:
        refuse_other_forms(model)
    except ConfigError as error:
        refused = str(error)
    return {
        "settings": {name: resolved[name] for name in SETTINGS}
        | {"requests of a decode graph": resolved["cuda_graph_config"]["decode"]["max_bs"]},
        "parameters": {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in receivable_tensors(model).items()
        },
        "refused": refused,
    }


def describe_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A forked process for each, because SGLang keeps much of it in globals; SGLang is imported once."""
    pretend_gpu(tuple(cases[0]["capability"]))
    from sglang.srt import server_args  # noqa: F401
    from sglang.srt.model_loader import loader  # noqa: F401
    from sglang.srt.models import qwen3, qwen3_moe  # noqa: F401

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(describe, cases, chunksize=1)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answers = describe_all(json.loads(sys.argv[1]))
    print(json.dumps(answers))
