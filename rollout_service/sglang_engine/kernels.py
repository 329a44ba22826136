"""Refuses kernels of SGLang that need weights in another form than that in which a sync writes them.

A sync writes parameters in the form in which SGLang's loader leaves them. Some kernels need another form, into which
SGLang converts the weights once, after loading: blocks (another shape), padding, or gate and up exchanged or
interleaved (the same shape, which no check of shapes would detect). A sync would overwrite it with the loader's form.
"""

from collections.abc import Mapping
from typing import Any

from servicekit.errors import ConfigError

# Reads weights in the loader's form. On Blackwell SGLang's choice would be flashinfer_trtllm: blocks of [up; gate].
MOE_RUNNER = "triton"
# The attention of FlashAttention, FlashInfer and TensorRT-LLM computes in 16 bits only.
FLOAT32_ATTENTION = "triton"

_INTERLEAVED = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"  # rows of gate and up alternate, for good
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
_OTHER_FORMS = (
    "use_triton_kernels",
    "use_flashinfer_cutlass",
    "use_flashinfer_trtllm_moe",
    "use_deep_gemm",
    "w13_swiglu_interleaved",
)


def refuse_environment(environ: Mapping[str, str]) -> None:
    """Check SGLang's variables. Raises: ConfigError: one selects weights in another form."""
    value = environ.get(_INTERLEAVED, "")
    if value.lower() not in ("", "0", "false"):
        raise ConfigError(
            f"{_INTERLEAVED}={value} stores the rows of experts' gate and up projections in turn, where a weight sync "
            "writes them as halves; unset it"
        )


def refuse_other_forms(model: Any) -> None:
    """Check a loaded torch module of SGLang. Raises: ConfigError: a layer keeps its weights in another form."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method).__name__
        if kind not in _AS_LOADED:
            raise ConfigError(f"{name}: SGLang's {kind} keeps its weights in another form than a weight sync writes")
        for flag in _OTHER_FORMS:
            if getattr(method, flag, False):
                raise ConfigError(
                    f"{name}: SGLang's {kind} has {flag}, which keeps weights in another form than a weight sync "
                    f"writes; experts take moe_runner_backend {MOE_RUNNER!r} only"
                )
