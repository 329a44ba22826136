"""Which of SGLang's kernels an engine may use: those that read weights in the form in which a sync writes them.

Weight sync writes parameters in the form that SGLang's loader gives them. Some kernels want another one, into which
SGLang brings the weights once, after loading: blocks (another shape), padded, or gate and up exchanged or interleaved
(the same shape, which no check of shapes would see). A sync would write the loader's form over it.
"""

from collections.abc import Mapping
from typing import Any

from servicekit.errors import ConfigError

# Read as they are loaded. On Blackwell SGLang would choose flashinfer_trtllm, which keeps blocks of [up; gate].
MOE_RUNNER = "triton"
# The attention of FlashAttention, FlashInfer and TensorRT-LLM computes in 16 bits only.
FLOAT32_ATTENTION = "triton"

_INTERLEAVED = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"  # rows of gate and up in turn; nothing brings them back
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
_OTHER_FORMS = (
    "use_triton_kernels",
    "use_flashinfer_cutlass",
    "use_flashinfer_trtllm_moe",
    "use_deep_gemm",
    "w13_swiglu_interleaved",
)


def refuse_environment(environ: Mapping[str, str]) -> None:
    """Raises: ConfigError: a variable of SGLang's asks for weights in another form."""
    value = environ.get(_INTERLEAVED, "")
    if value.lower() not in ("", "0", "false"):
        raise ConfigError(
            f"{_INTERLEAVED}={value} stores the rows of experts' gate and up projections in turn, where a weight sync "
            "writes them as halves; unset it"
        )


def refuse_other_forms(model: Any) -> None:
    """Look at a loaded torch module of SGLang's. Raises: ConfigError: a layer keeps its weights in another form."""
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
