"""The mapping rules of decoders with rotary attention and SwiGLU, dense or with a mixture of experts."""

from weightsync.families.rule import CanonicalPart, Placement, Rule

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."
_EXPERT = _MLP + "experts.{expert}."
_MCORE = "decoder.layers.{layer}."
_MCORE_MLP = _MCORE + "mlp."
_QKV = ("q_proj", "k_proj", "v_proj")
_QKV_ROWS = ("q", "kv", "kv")

ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        parts=(CanonicalPart(name=EMBEDDING, rows="vocab", cols="hidden"),),
        megatron=("embedding.word_embeddings.weight",),
        sglang=EMBEDDING,
        placement=Placement.VOCABULARY,
        stage="first",
    ),
    Rule(
        parts=(CanonicalPart(name=_LAYER + "input_layernorm.weight", rows="hidden"),),
        megatron=(_MCORE + "input_layernorm.weight", _MCORE + "self_attention.linear_qkv.layer_norm_weight"),
        sglang=_LAYER + "input_layernorm.weight",
        placement=Placement.REPLICATED,
    ),
    Rule(
        parts=tuple(
            CanonicalPart(name=f"{_LAYER}self_attn.{proj}.weight", rows=rows, cols="hidden")
            for proj, rows in zip(_QKV, _QKV_ROWS, strict=True)
        ),
        megatron=(_MCORE + "self_attention.linear_qkv.weight",),
        sglang=_LAYER + "self_attn.qkv_proj.weight",
        placement=Placement.QKV,
    ),
    Rule(
        parts=tuple(
            CanonicalPart(name=f"{_LAYER}self_attn.{proj}.bias", rows=rows)
            for proj, rows in zip(_QKV, _QKV_ROWS, strict=True)
        ),
        megatron=(_MCORE + "self_attention.linear_qkv.bias",),
        sglang=_LAYER + "self_attn.qkv_proj.bias",
        placement=Placement.QKV,
        when="qkv_bias",
    ),
    Rule(
        parts=(CanonicalPart(name=_LAYER + "self_attn.q_norm.weight", rows="head_dim"),),
        megatron=(_MCORE + "self_attention.q_layernorm.weight",),
        sglang=_LAYER + "self_attn.q_norm.weight",
        placement=Placement.REPLICATED,
        when="qk_norm",
    ),
    Rule(
        parts=(CanonicalPart(name=_LAYER + "self_attn.k_norm.weight", rows="head_dim"),),
        megatron=(_MCORE + "self_attention.k_layernorm.weight",),
        sglang=_LAYER + "self_attn.k_norm.weight",
        placement=Placement.REPLICATED,
        when="qk_norm",
    ),
    Rule(
        parts=(CanonicalPart(name=_LAYER + "self_attn.o_proj.weight", rows="hidden", cols="q"),),
        megatron=(_MCORE + "self_attention.linear_proj.weight",),
        sglang=_LAYER + "self_attn.o_proj.weight",
        placement=Placement.COLUMNS,
    ),
    Rule(
        parts=(CanonicalPart(name=_LAYER + "post_attention_layernorm.weight", rows="hidden"),),
        megatron=(_MCORE + "pre_mlp_layernorm.weight", _MCORE + "mlp.linear_fc1.layer_norm_weight"),
        sglang=_LAYER + "post_attention_layernorm.weight",
        placement=Placement.REPLICATED,
    ),
    Rule(
        parts=(CanonicalPart(name="model.norm.weight", rows="hidden"),),
        megatron=("decoder.final_layernorm.weight",),
        sglang="model.norm.weight",
        placement=Placement.REPLICATED,
        stage="last",
    ),
    Rule(
        parts=(CanonicalPart(name=LM_HEAD, rows="vocab", cols="hidden"),),
        megatron=("output_layer.weight",),
        sglang=LM_HEAD,
        placement=Placement.VOCABULARY,
        stage="last",
        when="untied",
    ),
)

MLP_RULES: tuple[Rule, ...] = (
    Rule(
        parts=(
            CanonicalPart(name=_MLP + "gate_proj.weight", rows="ffn", cols="hidden"),
            CanonicalPart(name=_MLP + "up_proj.weight", rows="ffn", cols="hidden"),
        ),
        megatron=(_MCORE_MLP + "linear_fc1.weight",),
        sglang=_MLP + "gate_up_proj.weight",
        layers="dense",
        placement=Placement.GATE_UP,
    ),
    Rule(
        parts=(CanonicalPart(name=_MLP + "down_proj.weight", rows="hidden", cols="ffn"),),
        megatron=(_MCORE_MLP + "linear_fc2.weight",),
        sglang=_MLP + "down_proj.weight",
        layers="dense",
        placement=Placement.COLUMNS,
    ),
)

# The router, and gate, up and down of each expert.
EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        parts=(CanonicalPart(name=_MLP + "gate.weight", rows="experts", cols="hidden"),),
        megatron=(_MCORE_MLP + "router.weight",),
        sglang=_MLP + "gate.weight",
        placement=Placement.REPLICATED,
        layers="experts",
    ),
    Rule(
        parts=(
            CanonicalPart(name=_EXPERT + "gate_proj.weight", rows="expert_ffn", cols="hidden"),
            CanonicalPart(name=_EXPERT + "up_proj.weight", rows="expert_ffn", cols="hidden"),
        ),
        megatron=(
            _MCORE_MLP + "experts.local_experts.{expert}.linear_fc1.weight",
            _MCORE_MLP + "experts.linear_fc1.weight{expert}",
        ),
        sglang=_MLP + "experts.w13_weight",
        placement=Placement.GATE_UP,
        layers="experts",
    ),
    Rule(
        parts=(CanonicalPart(name=_EXPERT + "down_proj.weight", rows="hidden", cols="expert_ffn"),),
        megatron=(
            _MCORE_MLP + "experts.local_experts.{expert}.linear_fc2.weight",
            _MCORE_MLP + "experts.linear_fc2.weight{expert}",
        ),
        sglang=_MLP + "experts.w2_weight",
        placement=Placement.COLUMNS,
        layers="experts",
    ),
)
