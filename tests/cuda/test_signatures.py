"""What our code imports of torch, megatron-core and SGLang takes what it took when somebody last looked.

`signatures.json` has parameters and defaults. Written anew with TANDEM_WRITE_GOLDEN=1, to be read, beside our calls,
before it is committed.
"""

import ast
import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.house.repository import PACKAGES, parse, python_files
from trainer_service.megatron_engine import build  # noqa: F401  (prepares megatron-core for a host without CUDA)

GOLDEN = Path(__file__).with_name("signatures.json")
ENGINES = ("torch", "megatron", "sglang")
# What is not imported by its name: methods that are called, replaced or called back, and operators.
METHODS = (
    "torch:UntypedStorage._share_cuda_",
    "torch:UntypedStorage._new_shared_cuda",
    "torch.profiler:profile.__init__",
    "torch.optim:AdamW.__init__",
    "torch.distributed:init_process_group",
    "torch.distributed:ProcessGroupNCCL.__init__",
    "torch.distributed:ProcessGroupNCCL.Options",
    "megatron.core.models.gpt:GPTModel.forward",
    "megatron.core.models.gpt:GPTModel._postprocess",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_emb",
    "megatron.core.models.common.embeddings:YarnRotaryEmbedding.get_emb",
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
    "megatron.core.parallel_state:initialize_model_parallel",
    "megatron.core.transformer.moe.router:TopKRouter.routing",
    "sglang.srt.layers.logits_processor:LogitsProcessor._compute_lm_head",
)
OPERATORS = ("mm.dtype", "_flash_attention_forward.default", "_flash_attention_backward.default")


def imported() -> list[str]:
    """Names that the product imports from modules of the engines, as module:name."""
    return sorted(
        f"{node.module}:{each.name}"
        for path in python_files(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ENGINES
        for each in node.names
    )


def signature_of(what: str) -> str | None:
    """Parameters with their defaults; None: it is not called."""
    module, _, path = what.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        if not hasattr(found, name) and inspect.ismodule(found):
            return None  # a module
        found = getattr(found, name)
    if not callable(found):
        return None
    try:
        parameters = inspect.signature(found).parameters.values()
    except (ValueError, TypeError):  # of C++
        return (found.__doc__ or "").strip().partition("\n")[0]
    return ", ".join(written(each) for each in parameters)


def written(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        stars = "* "
    default = parameter.default
    if default is inspect.Parameter.empty:
        return f"{stars}{parameter.name}"
    plain = default is None or isinstance(default, (bool, int, float, str))
    return f"{stars}{parameter.name}={default if plain else '...'}"


def test_what_we_call_takes_what_it_took() -> None:
    found = {what: taken for what in [*imported(), *METHODS] if (taken := signature_of(what)) is not None}
    for name in OPERATORS:
        operator, overload = name.split(".")
        found[f"aten:{name}"] = str(getattr(getattr(torch.ops.aten, operator), overload)._schema)
    if os.environ.get("TANDEM_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    changed = {what: (golden.get(what), taken) for what, taken in found.items() if golden.get(what) != taken}
    assert changed == {}
    assert golden.keys() == found.keys()
    assert "torch.nn.attention.varlen:varlen_attn" in golden
