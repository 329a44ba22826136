"""The engines that test_parity.py compares with transformers: model, layout and variant of the algorithm of each."""

from dataclasses import dataclass

from tandem_config.schema import TrainerSection
from tests.integration.trainer.layouts import LAYOUTS


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine: model kind, layout, variant of the algorithm, parameter type."""

    kind: str
    layout: str
    variant: str = "full"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layout}-{self.variant}-{self.dtype}"

    @property
    def world_size(self) -> int:
        return TrainerSection.model_validate(LAYOUTS[self.layout]).world_size


# Most features and ways to divide a model, once; SLOW has the others, and the other pairs of them. What the loss of one
# rank is made of is compared with transformers in tests/unit/trainer/test_steps.py.
EXACT = [
    *(Case(kind="qwen3", layout=layout) for layout in ("tp1", "tp2-pp2")),
    Case(kind="llama", layout="tp2"),
    *(Case(kind="qwen3", layout="dp2", variant=variant) for variant in ("skips", "epochs")),
    Case(kind="qwen3", layout="tp2-sequence", variant="chunks"),
    Case(kind="qwen3", layout="cp2", variant="gspo"),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="kl"),
    Case(kind="qwen3", layout="cp2", variant="masked-shared"),
    Case(kind="qwen3", layout="tp2-sequence", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3", layout="cp2", variant="recompute-parts"),
    Case(kind="qwen3", layout="dp2-overlap"),
    Case(kind="qwen2-tied", layout="pp2-dp2-zero"),
    *(Case(kind="qwen3-moe", layout=layout) for layout in ("ep2", "ep2-pp2", "etp2-overlap", "cp2-ep2")),
    Case(kind="qwen2-5-layers", layout="pp2-embedding"),
    Case(kind="qwen3", layout="cp2-pp2-virtual"),
    Case(kind="qwen3-kv1", layout="tp2-sequence"),
]
SLOW = [
    *(Case(kind="qwen3", layout=layout) for layout in ("tp2-sequence", "dp2")),
    Case(kind="qwen2-tied", layout="pp2"),
    Case(kind="qwen2", layout="tp4"),
    *(Case(kind="qwen3", layout="dp2", variant=variant) for variant in ("rollout", "cispo")),
    *(Case(kind="qwen3", layout="tp1", variant=variant) for variant in ("decoupled", "decay")),
    Case(kind="qwen3", layout="cp2", variant="masked"),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="recompute-one"),
    *(Case(kind="qwen3", layout=layout) for layout in ("tp2", "pp2", "cp2", "dp2-zero", "cp2-zero")),
    *(Case(kind="qwen2-tied", layout=layout) for layout in ("tp2", "dp2", "pp2-virtual")),
    *(Case(kind="qwen2", layout=layout) for layout in ("tp2-pp2", "pp2-first")),
    Case(kind="llama", layout="pp2"),
    Case(kind="qwen3", layout="tp2-pp2", variant="skips"),
    Case(kind="qwen2-tied", layout="tp1", variant="chunks"),
    Case(kind="qwen3", layout="cp2", variant="chunks"),
    Case(kind="qwen3", layout="tp2-pp2", variant="gspo"),
    *(Case(kind="qwen3", layout=layout, variant="kl") for layout in ("tp2-sequence", "cp2")),
    Case(kind="qwen3", layout="tp2-pp2", variant="epochs"),
    *(Case(kind="qwen3", layout=layout, variant="masked") for layout in ("dp2", "tp2-pp2")),
    Case(kind="qwen3", layout="cp2", variant="masked-gspo"),
    *(Case(kind="qwen3", layout=layout, variant="shared") for layout in ("dp2", "tp2-pp2")),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared-gspo"),
    Case(kind="qwen2-tied", layout="tp2-cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3", layout="tp2-pp2", variant="recompute"),
    Case(kind="qwen3", layout="dp2-overlap", variant="epochs"),
    Case(kind="qwen3-moe", layout="ep2", variant="recompute"),
    *(Case(kind="qwen3-moe", layout=layout) for layout in ("tp1", "etp2")),
    Case(kind="qwen3-moe-mixed", layout="ep2"),
    Case(kind="qwen2-tied-6-layers", layout="pp2-virtual-both"),
    *(Case(kind="qwen2-tied", layout=layout) for layout in ("tp1", "tp2-sequence", "tp2-pp2")),
    *(Case(kind="qwen2", layout=layout) for layout in ("tp1", "tp2", "tp2-sequence", "pp2", "dp2")),
    Case(kind="qwen3", layout="tp1", variant="skips"),
    Case(kind="qwen3", layout="tp1", variant="rollout"),
    Case(kind="qwen2-tied", layout="pp2", variant="chunks"),
    *(Case(kind="qwen3", layout=layout, variant="gspo") for layout in ("tp1", "dp2")),
    Case(kind="qwen3", layout="tp1", variant="cispo"),
    *(Case(kind="qwen3", layout=layout, variant="kl") for layout in ("tp1", "dp2")),
    Case(kind="qwen2-tied", layout="tp2-pp2", variant="kl"),
    Case(kind="qwen3-moe", layout="ep2", variant="kl"),
    *(Case(kind="qwen3", layout=layout, variant="epochs") for layout in ("tp1", "cp2")),
    *(Case(kind="qwen3", layout=layout, variant="masked") for layout in ("tp1", "tp2-sequence")),
    Case(kind="qwen3", layout="tp1", variant="masked-gspo"),
    Case(kind="qwen3", layout="tp1", variant="shared"),
    Case(kind="qwen3-moe", layout="ep2", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared"),
    Case(kind="qwen3", layout="dp2-cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3-moe", layout="cp2-ep2", variant="shared"),
    Case(kind="qwen2", layout="tp1", variant="decay"),
    *(Case(kind="qwen3", layout=layout, variant="recompute") for layout in ("tp2-sequence", "dp2")),
    Case(kind="qwen3", layout="tp2-sequence", variant="recompute-parts"),
    Case(kind="qwen3", layout="dp2-reduce"),
    Case(kind="qwen2-tied", layout="dp2-overlap"),
    Case(kind="qwen3-moe", layout="ep2-zero"),
    *(Case(kind="qwen3", layout="dp2-overlap", variant=variant) for variant in ("recompute", "skips")),
    Case(kind="qwen3-moe", layout="ep2", variant="recompute-parts"),
    Case(kind="qwen3-moe", layout="tp2-ep2"),
    Case(kind="qwen3", layout="pp2-virtual"),
    *(Case(kind=kind, layout="tp4-sequence") for kind in ("qwen3", "llama", "qwen3-moe", "qwen3-kv1")),
    *(Case(kind=kind, layout=layout) for kind in ("qwen2-kv1", "qwen3-kv1") for layout in ("tp2", "tp2-cp2")),
    *(
        Case(kind="qwen3-moe", layout=layout)
        for layout in ("tp2-sequence", "tp2-etp2", "ep2-pp2-virtual", "tp2-dp2-ep2-etp2")
    ),
    *(Case(kind="qwen3-moe-mixed", layout=layout) for layout in ("tp1", "tp2-ep2", "ep2-pp2")),
    *(Case(kind="llama-tied", layout=layout) for layout in ("tp1", "tp2", "pp2", "pp2-virtual", "tp2-pp2-virtual")),
    *(Case(kind="qwen2-yarn", layout=layout) for layout in ("tp2-cp2", "pp2-virtual")),
    Case(kind="qwen2", layout="pp2-last"),
    Case(kind="qwen2-5-layers", layout="pp2-loss"),
    *(Case(kind="qwen2-1-layer", layout=layout) for layout in ("pp2-embedding", "pp2-loss")),  # a stage without layers
    *(Case(kind=kind, layout="tp2-cp2") for kind in ("qwen2", "qwen2-tied", "qwen3-moe")),
    *(Case(kind="qwen3", layout=layout) for layout in ("tp2-dp2-overlap", "pp2-dp2-overlap")),
    Case(kind="qwen2-tied", layout="pp2-dp2-overlap", variant="kl"),
    Case(kind="qwen3", layout="cp2", variant="rollout"),
    Case(kind="qwen3-moe", layout="tp2-ep2", variant="decay"),
    Case(kind="qwen3-moe", layout="ep2", variant="skips"),
    # four ranks of one kind, and pairs of kinds without the distributed optimizer and without virtual stages
    *(Case(kind="qwen3", layout=layout) for layout in ("pp4", "dp4", "cp4", "tp2-dp2", "pp2-dp2", "cp2-pp2")),
    Case(kind="qwen3-moe", layout="ep4"),
    Case(kind="qwen2-tied", layout="pp4", variant="shared"),
    *(Case(kind="qwen3", layout=layout, variant="skips") for layout in ("dp4", "cp4")),
    *(
        Case(kind="qwen3", layout=layout, variant=variant)
        for variant in ("decoupled", "dr-grpo", "kl-k1", "tis-sequence", "tis-geometric", "mis-token", "mis-geometric")
        for layout in ("dp2", "cp2", "tp2-pp2")
    ),
    Case(kind="qwen3", layout="cp2", variant="cispo"),
    Case(kind="qwen3", layout="tp2-pp2", variant="cispo"),
]
BFLOAT16 = [
    Case(kind="qwen3", layout="tp2", dtype="bfloat16"),
    Case(kind="qwen3", layout="dp2-overlap", dtype="bfloat16"),
]
SLOW_BFLOAT16 = [
    Case(kind="qwen3-moe", layout="ep2", dtype="bfloat16"),
    Case(kind="qwen2-tied", layout="pp2-virtual", dtype="bfloat16"),
    Case(kind="qwen3", layout="tp2", variant="recompute", dtype="bfloat16"),
    Case(kind="qwen3", layout="dp2-zero", dtype="bfloat16"),
]
