"""Memory of each trainer rank and rollout rank, in bytes, estimated from the settings: no GPU, no torch.

The trainer is counted as trainer_service.megatron_engine builds it, with flash attention. The micro-batch is taken as
full, and all of its tokens as completion tokens. Memory peaks at one of four places: at the output layer, with the
activations that every layer keeps (forward, or as the backward pass begins); where a layer's activations are computed
again (trainer.recompute); where its attention reads copies of keys and values (trainer.share_prompts, context
parallelism); in the optimizer (gradients are clipped, and masters rounded, one tensor at a time). Tokens are taken as
evenly spread over experts. Prompts and completions that share them have their longest length.

Not counted: what CUDA, NCCL and the allocator's fragments take (1 to 3 GiB); an engine's activations (SGLang's own
estimate is 1.5 MiB for each token of a prefill chunk; they are freed before a weight sync); other temporary tensors
inside a layer; in float32, for which there is no kernel, the scores of completions that share a prompt.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tandem_config.schema import RunConfig
from tandem_config.sections.rollout import MAX_GRAPH_REQUESTS
from trainer_service.checkpoints.files import EXPERTS
from trainer_service.micro_batches.chunks import chunk_tokens
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout, padded_vocabulary
from weightsync.layouts.sglang import sglang_layout
from weightsync.layouts.stages import ModelChunk, chunks_of
from weightsync.model.spec import ModelSpec
from weightsync.plans.limits import bucket_bytes, largest_message

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT = 4
# message buffers of a rank, each as large as the largest message (sync.bucket_mib)
_BUCKETS = 2
# SGLang's own reserve for CUDA graphs (arg_groups/memory_hook.py): for each request of the largest decode batch that we
# let it capture, and for each of the 58 prompt sizes up to 8,192 tokens.
_GRAPH_REQUEST, _GRAPH_PROMPTS = 2 * 2**20, 58 * 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Memory of a trainer rank of one pipeline stage, in bytes.

    Attributes:
        resident: parameters, float32 gradients, AdamW's state and, for bfloat16, its float32 parameters (a rank's
            share of these two under trainer.distributed_optimizer).
        activations: what the layers keep for the backward pass, of all micro-batches in flight.
        recomputed: what the backward pass computes again and holds at a time: of one layer.
        copies: the copies of keys and values that the attention of one layer reads, and their gradients.
        logits: two chunks of the local vocabulary's, and the hidden states that they are computed from.
        head_backward: the same in the output layer's backward pass, with the gradients of its weight and of its input.
        optimizer: temporary memory of an optimizer's step: a float32 copy of the largest parameter.
        reference: the reference policy's weights, which are on the GPU only while it is measured.
        buffers: message buffers of a weight sync.
        indices: of a step's micro-batches and of its tokens, all of which are there during the step.
        idle: what is left of `resident` while the trainer does nothing (trainer.offload).
        host: page-locked host memory: what is offloaded, the reference policy, and a copy to undo a step.
        saved: host memory of a checkpoint's copy, on a rank that writes one: of experts, and of the rest.
    """

    stage: int
    resident: int
    activations: int
    recomputed: int
    copies: int
    logits: int
    head_backward: int
    optimizer: int
    reference: int
    buffers: int
    indices: int
    idle: int
    host: int
    saved: tuple[int, int]

    @property
    def forward(self) -> int:
        """Bytes at the loss, between the forward and the backward pass."""
        return self.resident + self.activations + self.logits

    @property
    def peak(self) -> int:
        """Most bytes at any moment of a train step or a weight sync."""
        return self.resident + max(self._moments.values())

    @property
    def moment(self) -> str:
        """The moment of the peak, as text for messages."""
        return max(self._moments, key=lambda name: self._moments[name])

    @property
    def _moments(self) -> dict[str, int]:
        """Bytes besides `resident`."""
        in_step = {
            "at the forward's peak": self.activations + self.logits,
            "in the output layer's backward pass": self.activations + self.head_backward,
            "where a layer is computed again": self.activations + self.recomputed if self.recomputed > 0 else 0,
            "where a layer attends to copies": self.activations + self.recomputed + self.copies if self.copies else 0,
            "in the optimizer": self.optimizer,
            "while the reference policy is measured": self.reference + self.logits if self.reference > 0 else 0,
        }
        return {name: size + self.indices for name, size in in_step.items()} | {"in a weight sync": self.buffers}


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Memory of a rollout rank, in bytes.

    Attributes:
        graphs: CUDA graphs.
        spare: second copy of the weights, for `sync.install: staged`.
        buffers: message buffers of a weight sync.
        token: KV cache of one token.
        wanted_tokens: tokens that the KV cache should hold; None: as many as it can.
    """

    weights: int
    graphs: int
    spare: int
    buffers: int
    token: int
    wanted_tokens: int | None

    def cache_tokens(self, static: int) -> int:
        """Return how many tokens of KV cache fit into `static` bytes next to the weights; at most `wanted_tokens`."""
        fit = max(0, (static - self.weights) // self.token)
        return fit if self.wanted_tokens is None else min(self.wanted_tokens, fit)

    def peak(self, static: int) -> int:
        """Sum up weights, KV cache (in `static` bytes with the weights), CUDA graphs and what a weight sync needs."""
        return self.weights + self.cache_tokens(static) * self.token + self.graphs + self.spare + self.buffers


def trainer_memory(config: RunConfig, spec: ModelSpec, *, completion_share: float = 1.0) -> list[TrainerMemory]:
    """Estimate the memory of the first rank of every pipeline stage.

    Args:
        completion_share: share of a micro-batch's tokens that belong to completions and so have a loss; 0 to 1.
    Raises: ConfigError: the parallel sizes do not fit the model.
    """
    parallel = Parallel(**config.trainer.parallel_sizes)
    # only experts are spread over these copies of the model
    cut = replace(parallel, data=1, context=1) if spec.num_experts == 0 else parallel
    chunks = chunks_of(spec.num_layers, parallel)
    width = DTYPE_BYTES[config.model.dtype]
    found = []
    for stage in range(parallel.pipeline):
        elements, largest = _elements(spec, cut, stage)
        stepped = _stepped(config, parallel, elements)
        with_head = _head(config, spec, parallel, completion_share)
        logits, head_backward = with_head if stage == parallel.pipeline - 1 else (0, 0)
        activations, recomputed = _activations(config, spec, parallel, chunks, stage)
        masters = _FLOAT if width < _FLOAT else 0
        reference = width if config.grpo.kl_coefficient != 0 else 0
        undone = 3 * _FLOAT if config.grpo.updates_per_iteration * config.grpo.epochs > 1 else 0
        resident = sum(elements) * (width + _FLOAT) + stepped * (masters + 2 * _FLOAT)
        offload = config.trainer.offload
        kept = sum(elements) * width if offload.parameters else 0
        kept += stepped * (masters + 2 * _FLOAT) if offload.optimizer else 0
        dropped = sum(elements) * _FLOAT if offload.gradients else 0
        found.append(
            TrainerMemory(
                stage=stage,
                resident=resident,
                activations=activations,
                recomputed=recomputed,
                copies=_copies(config, spec, parallel),
                logits=logits,
                head_backward=head_backward,
                optimizer=largest * _FLOAT,
                reference=sum(elements) * reference,
                buffers=_BUCKETS * _bucket_bytes(config),
                indices=_indices(config, parallel),
                idle=resident - kept - dropped,
                host=kept + sum(elements) * reference + stepped * undone,
                saved=(elements[1] * _saved(config), elements[0] * _saved(config)),
            )
        )
    return found


def _indices(config: RunConfig, parallel: Parallel) -> int:
    """Return the bytes of what a step keeps of its samples, which are all the longest (packed.py, token_loss.py).

    int64: ids and places of tokens, keys where a row has others than its own, three indices of completions' tokens; of
    the updates, and of what is measured before. Of all completions' tokens: five float32, three bool, an int64.
    """
    grpo, context = config.grpo, parallel.context
    samples = grpo.prompts_per_iteration * grpo.group_size
    completions, prompts = samples * grpo.max_new_tokens, samples * config.data.max_prompt_tokens
    keys = context + 1 / 2 if context > 1 else int(config.trainer.share_prompts)
    passes = 2 - 1 / grpo.updates_per_iteration if grpo.old_logprobs == "recompute" else 1
    rows = 8 * ((2 + keys) * (completions + prompts) + 3 * completions) / (parallel.data * context)
    return int(rows * passes) + 31 * completions


def _saved(config: RunConfig) -> int:
    """Return the bytes of a parameter in a checkpoint."""
    width, refreshes = _width(config), config.grpo.kl_coefficient != 0 and config.grpo.reference_refresh_every
    optimizer = 2 * _FLOAT + (_FLOAT if width < _FLOAT else 0)
    return width * (2 if refreshes else 1) + (optimizer if config.trainer.checkpoint_optimizer else 0)


@lru_cache(maxsize=64)
def _elements(spec: ModelSpec, cut: Parallel, stage: int) -> tuple[tuple[int, int], int]:
    """Count the parameters of a stage's first rank, those of experts apart, and those of the largest tensor.

    It takes seconds for a large mixture of experts, so it is done once.
    """
    shapes = megatron_layout(spec, cut).parameters_of(stage * cut.stage_size)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    experts = sum(size for name, size in sizes.items() if EXPERTS in name)
    return (sum(sizes.values()) - experts, experts), max(sizes.values())


def _stepped(config: RunConfig, parallel: Parallel, elements: tuple[int, int]) -> int:
    """Count the parameters that a rank's AdamW steps: under ZeRO-1 a share of those that other ranks have too."""
    if not config.trainer.distributed_optimizer:
        return sum(elements)
    copies = parallel.data * parallel.context
    of_experts = parallel.tensor * copies // (parallel.expert * parallel.expert_tensor)
    return -(-elements[0] // copies) - (-elements[1] // of_experts)


def _activations(
    config: RunConfig, spec: ModelSpec, parallel: Parallel, chunks: list[ModelChunk], stage: int
) -> tuple[int, int]:
    """Return the bytes that a stage keeps for its backward pass, and the most that this computes again at a time."""
    mine = [chunk for chunk in chunks if chunk.stage == stage]
    layers = [
        _kept(config, spec, parallel, layer, index)
        for chunk in mine
        for index, layer in enumerate(range(chunk.first_layer, chunk.first_layer + chunk.num_layers))
    ]
    held = sum(kept for kept, _ in layers) * _chunks_under_way(parallel, stage) // parallel.virtual_pipeline
    row = spec.hidden_size * _width(config)
    split = _split_tokens(config, parallel)
    # the final norm's input and output; mcore's buffer for what sequence parallelism gathers
    last = 2 * split * row if stage == parallel.pipeline - 1 else 0
    gathered = _tokens(config, parallel) * row if split < _tokens(config, parallel) else 0
    # cosines and sines of each micro-batch under way, for all layers (megatron_engine/attention/rotary.py)
    rotations = _tokens(config, parallel) * spec.head_dim * _FLOAT
    under_way = -(-_chunks_under_way(parallel, stage) // parallel.virtual_pipeline)
    return held + last + gathered + under_way * rotations, max((again for _, again in layers), default=0)


def _kept(config: RunConfig, spec: ModelSpec, parallel: Parallel, layer: int, index: int) -> tuple[int, int]:
    """Return the bytes that a layer keeps of one micro-batch, and those that it computes again (trainer.recompute).

    Args:
        index: of the layer in its chunk.
    """
    trainer = config.trainer
    if trainer.recompute == "full" and (trainer.recompute_layers is None or index < trainer.recompute_layers):
        return _split_tokens(config, parallel) * spec.hidden_size * _width(config), _layer(
            config, spec, parallel, layer
        )
    core, mlp = _core_attention(config, spec, parallel), _mlp(config, spec, parallel, layer)
    modules = trainer.recompute_modules if trainer.recompute == "selective" else ()
    name = "moe" if spec.has_experts(layer) else "mlp"
    again = (core if "core_attn" in modules else 0) + (mlp if name in modules else 0)
    inputs = _unkept_inputs(config, spec, parallel) if "core_attn" in modules else 0
    return _layer(config, spec, parallel, layer) + inputs - again, again


def _chunks_under_way(parallel: Parallel, stage: int) -> int:
    """Return the most forward passes of a chunk that await their backward pass, in mcore's schedules."""
    later, virtual = parallel.pipeline - stage - 1, parallel.virtual_pipeline
    return later + 1 if virtual == 1 else 2 * later + (virtual - 1) * parallel.pipeline + 1


def _layer(config: RunConfig, spec: ModelSpec, parallel: Parallel, layer: int) -> int:
    """Return the bytes that one layer keeps of one micro-batch without any recompute."""
    tokens, split, width = _tokens(config, parallel), _split_tokens(config, parallel), _width(config)
    q, kv = _projected(spec, parallel)
    norms = split * (4 * spec.hidden_size * width + 2 * _FLOAT)  # in and out, twice; a scale per token
    attention = 0
    if parallel.context > 1:
        # the output, and what the norms of q and k take and give
        attention += tokens * (q + (2 * (q + kv) if spec.qk_norm else 0)) * width
    else:
        # Projected q, k, v (v is read from there), and the output.
        attention += tokens * ((q + 2 * kv) + q) * width
        attention += tokens * (q + kv) * width if spec.qk_norm else 0
    core, mlp = _core_attention(config, spec, parallel), _mlp(config, spec, parallel, layer)
    return norms + attention + core + mlp


def _projected(spec: ModelSpec, parallel: Parallel) -> tuple[int, int]:
    """Return the width of a rank's queries, and of its keys."""
    return spec.size("q") // parallel.tensor, max(spec.head_dim, spec.size("kv") // parallel.tensor)


def _core_attention(config: RunConfig, spec: ModelSpec, parallel: Parallel) -> int:
    """Return the bytes that the core attention of a layer keeps, besides its inputs and its output."""
    tokens, width = _tokens(config, parallel), _width(config)
    q, kv = _projected(spec, parallel)
    if parallel.context > 1 and width == _FLOAT:
        return _scores(config, parallel, tokens, q, q // spec.head_dim)
    # rotated queries, and keys: the rank's own, or keys and values of all ranks; a log-sum per head
    keys = kv if parallel.context == 1 else 2 * parallel.context * kv
    return tokens * (q + keys) * width + tokens * (q // spec.head_dim) * _FLOAT


def _unkept_inputs(config: RunConfig, spec: ModelSpec, parallel: Parallel) -> int:
    """Return the bytes of queries, keys and values that only a core attention that is computed again keeps."""
    q, kv = _projected(spec, parallel)
    if parallel.context == 1 or spec.qk_norm:
        return 0
    return _tokens(config, parallel) * (q + 2 * kv) * _width(config)


def _scores(config: RunConfig, parallel: Parallel, tokens: int, q: int, heads: int) -> int:
    """Return the bytes that attention keeps under context parallelism in float32, which has no fused kernel.

    Queries, keys and values of every head, and the attention weights: a token's chunk, one of 2 * CP, attends to those
    up to its own, on average to CP + 1/2 of them.
    """
    chunks = 2 * parallel.context
    longest = min(tokens * parallel.context, config.data.max_prompt_tokens + config.grpo.max_new_tokens)
    columns = longest * (chunks + 1) // (2 * chunks)
    return tokens * ((chunks + 2) * q + heads * columns) * _FLOAT


def _copies(config: RunConfig, spec: ModelSpec, parallel: Parallel) -> int:
    """Return the bytes of the keys and values that a layer's attention copies, and of their gradients.

    Each completion of a group has a copy of the prompt, on each context-parallel rank one for either of its two chunks.
    Those have copies of what is before them in their sequence. 0 where each sequence attends to itself only.
    """
    context, group = parallel.context, config.grpo.group_size if config.trainer.share_prompts else 1
    if context == 1 and group == 1:
        return 0
    prompt, completion = config.data.max_prompt_tokens, config.grpo.max_new_tokens
    rows, chunks = config.trainer.max_tokens_per_micro_batch, 2 if context > 1 else 1
    of_prompts = rows * chunks * group * prompt // (prompt + group * completion) if group > 1 else 0
    own = rows if context == 1 else rows * (2 * context + 1) // (2 * context)
    _, kv = _projected(spec, parallel)
    # of the row, or of all ranks' rows, there is a gradient too
    return 2 * (2 * (of_prompts + own) + rows) * kv * _width(config)


def _mlp(config: RunConfig, spec: ModelSpec, parallel: Parallel, layer: int) -> int:
    """Return the bytes that the MLP of a layer keeps, or its experts, besides its input."""
    tokens, split, width = _tokens(config, parallel), _split_tokens(config, parallel), _width(config)
    if not spec.has_experts(layer):
        # gate and up, the activated gate, mcore's up + 0, their product
        return 5 * tokens * (spec.ffn_size // parallel.tensor) * width
    routed = split * spec.experts_per_token * parallel.expert_tensor
    # as above, the product times the router's weight, and the tokens sorted by expert, before and after
    per_token = 6 * (spec.expert_ffn_size // parallel.expert_tensor) + 2 * spec.hidden_size
    return routed * per_token * width + 3 * split * spec.num_experts * _FLOAT


def _head(config: RunConfig, spec: ModelSpec, parallel: Parallel, completion_share: float) -> tuple[int, int]:
    """Return the bytes of the output layer (megatron_engine/head/logprobs.py), forward and backward.

    Forward: a copy of the completions' hidden states, and two float32 chunks of logits. Backward: their gradient too,
    and either two chunks, or one in the parameters' type and its part of the weight's gradient.
    """
    columns = padded_vocabulary(spec, parallel.tensor) // parallel.tensor
    completions, width = int(_tokens(config, parallel) * completion_share), _width(config)
    hidden = completions * spec.hidden_size * width
    chunk = chunk_tokens(completions, columns) * columns
    backward = max(2 * chunk * _FLOAT, (chunk + columns * spec.hidden_size) * width)
    return hidden + 2 * chunk * _FLOAT, 2 * hidden + backward


def rollout_memory(config: RunConfig, spec: ModelSpec) -> RolloutMemory:
    """Estimate the memory of a replica's rank. Raises: ConfigError: the parallel sizes do not fit the model."""
    rollout = config.rollout
    layout = sglang_layout(spec, Parallel(tensor=rollout.tensor_parallel, expert=rollout.expert_parallel))
    width = 2 if config.sync.dtype == "bfloat16" else _width(config)
    weights = sum(math.prod(shape) for shape in layout.parameters_of(0).values()) * width
    return RolloutMemory(
        weights=weights,
        graphs=_GRAPH_PROMPTS + _GRAPH_REQUEST * min(rollout.max_running_requests, MAX_GRAPH_REQUESTS),
        spare=weights if config.sync.install == "staged" else 0,
        buffers=_BUCKETS * _bucket_bytes(config),
        token=2 * spec.num_layers * max(1, spec.num_kv_heads // rollout.tensor_parallel) * spec.head_dim * width,
        wanted_tokens=rollout.max_total_tokens,
    )


def _width(config: RunConfig) -> int:
    return DTYPE_BYTES[config.model.dtype]


def _tokens(config: RunConfig, parallel: Parallel) -> int:
    """Return the tokens of a full micro-batch on one rank."""
    return -(-config.trainer.max_tokens_per_micro_batch // parallel.context)


def _split_tokens(config: RunConfig, parallel: Parallel) -> int:
    """Return the tokens that a rank holds between the layers: a part of them under sequence parallelism."""
    sequence_parallel = config.trainer.sequence_parallel and parallel.tensor > 1
    return -(-_tokens(config, parallel) // parallel.tensor) if sequence_parallel else _tokens(config, parallel)


def _bucket_bytes(config: RunConfig) -> int:
    return largest_message(bucket_bytes(config.sync.bucket_mib), "cuda", config.rollout.replicas)
