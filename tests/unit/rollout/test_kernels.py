import pytest
import torch

from rollout_service.sglang_engine.kernels import refuse_environment, refuse_other_forms
from servicekit.errors import ConfigError


class UnquantizedFusedMoEMethod:
    """Named as SGLang's; what it would do to the weights is said by attributes, as there."""

    def __init__(self, **flags: bool) -> None:
        self.__dict__.update(flags)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    pass


def model(method: object) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method
    return torch.nn.ModuleDict({"experts": layer, "norm": torch.nn.LayerNorm(2)})


def test_weights_in_the_form_of_the_checkpoint_are_taken() -> None:
    refuse_other_forms(model(UnquantizedFusedMoEMethod(use_deep_gemm=False, w13_swiglu_interleaved=False)))


@pytest.mark.parametrize(
    "flag", ["use_triton_kernels", "use_flashinfer_cutlass", "use_flashinfer_trtllm_moe", "w13_swiglu_interleaved"]
)
def test_a_kernel_that_keeps_weights_in_another_form_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"experts: SGLang's UnquantizedFusedMoEMethod has {flag}"):
        refuse_other_forms(model(UnquantizedFusedMoEMethod(**{flag: True})))


def test_a_quantized_layer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="experts: SGLang's Fp8MoEMethod"):
        refuse_other_forms(model(Fp8MoEMethod()))


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_a_variable_that_interleaves_gate_and_up_is_refused(value: str | None, refused: bool) -> None:
    environ = {} if value is None else {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": value}
    if refused:
        with pytest.raises(ConfigError, match=f"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED={value}"):
            refuse_environment(environ)
    else:
        refuse_environment(environ)
