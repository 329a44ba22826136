"""mcore's GPTModel whose last stage returns log-probs and entropies of chosen tokens instead of all logits.

Its layers get the rotations of queries and keys ready to use, with the packing of the row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from trainer_service.megatron_engine.attention.packing import RowPacking
from trainer_service.megatron_engine.attention.rotary import Rotation
from trainer_service.megatron_engine.head.logprobs import VocabShard, logprob_entropy
from trainer_service.micro_batches.chunks import chunk_tokens


@dataclass(frozen=True, kw_only=True)
class ChosenTokens:
    """The t tokens of a packed row [1, T] that need a log-prob."""

    positions: Tensor  # [t] which hidden state predicts the token
    targets: Tensor  # [t] token ids


class OutputHead(torch.nn.Module):
    """Holds the weight of mcore's output layer, and takes its place.

    It is called as a module, so that mcore's hooks on modules (gathering parameters) find it.
    """

    def __init__(self, layer: Any, *, true_vocab: int, temperature: float) -> None:
        super().__init__()
        self.weight = layer.weight  # None: the embedding's is used
        self._group = layer.tp_group
        self._sequence_parallel = layer.sequence_parallel
        self._shard = VocabShard.of(layer.tp_group, layer.output_size_per_partition, true_vocab, temperature)

    def forward(self, hidden: Tensor, chosen: ChosenTokens, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies, [t] float32 each.

        Args:
            hidden: [T, 1, h] after the final norm; this rank's part of T under sequence parallelism.
            weight: [v, h] of the embedding, if the two are tied.
        """
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._group)
        hidden = hidden.flatten(0, 1).index_select(0, chosen.positions)  # [t, h]
        if not self._sequence_parallel:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        weight = self.weight if weight is None else weight
        chunk = chunk_tokens(hidden.shape[0], weight.shape[0])
        return logprob_entropy(hidden, weight, chosen.targets, self._shard, chunk)


class PolicyModel(GPTModel):
    """A chunk of the policy: `labels` of its forward pass are `ChosenTokens`."""

    output_layer: Any

    def __init__(self, *args: Any, true_vocab: int, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position_embedding_type = "none"  # of this name mcore has no angles to give to its layers
        if self.post_process:
            self.output_layer = OutputHead(self.output_layer, true_vocab=true_vocab, temperature=temperature)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowPacking,
        **kwargs: Any,
    ) -> Any:
        """Run the chunk on a packed row.

        Args:
            input_ids, position_ids: [1, T] of this rank; positions begin anew with each sample.
        """
        packing = replace(packed_seq_params, rotation=self._rotation(position_ids, packed_seq_params.max_seqlen_kv))
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packing, **kwargs)

    def _rotation(self, position_ids: Tensor, longest: int) -> Rotation:
        made = self.rotary_pos_emb.get_emb(longest)
        angles, factor = made if isinstance(made, tuple) else (made, 1.0)  # YaRN's come with its factor
        return Rotation.of(angles, position_ids, factor)

    def _postprocess(self, hidden_states: Tensor, *, labels: ChosenTokens, **_: Any) -> Any:
        """Return hidden states to the next stage, or the results of the last one."""
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, labels, weight)
