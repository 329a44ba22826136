"""FLOPs of a model's passes over samples, from its sizes: two for each multiplication of a matrix product.

Norms, activations, rotary embeddings, softmaxes and the optimizer are not counted, as is usual for a model-FLOPs
utilisation. Nor is anything that is computed twice, or for padding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.model.spec import ModelSpec

# A backward pass computes two products for each of the forward pass: the gradients of its input and of its weight.
BACKWARD = 2


@dataclass(frozen=True, kw_only=True)
class FlopCosts:
    """FLOPs of a forward pass through all layers.

    Attributes:
        token: of a token, for the weights that it meets: attention's projections, its MLP or its chosen experts and
            their router.
        pair: of a query and a key that it sees, over all heads: its score, and its share of the weighted values.
        completion: of a completion token of the policy, in the output layer, which sees no others.
    """

    token: float
    pair: float
    completion: float

    @classmethod
    def of(cls, spec: ModelSpec) -> "FlopCosts":
        """Derive them from a model's sizes and its family's rules."""
        weights, pair = spec.matrix_elements("layer", spec.experts_per_token), 4 * spec.size("q") * spec.num_layers
        return cls(token=2 * weights, pair=pair, completion=2 * spec.hidden_size * spec.vocab_size)

    @property
    def even_length(self) -> float:
        """Return the tokens of a sequence whose pairs cost as much as its tokens: a token sees half on average."""
        return self.token / (self.pair / 2)

    def forward(
        self,
        prompt_lengths: NDArray[np.int64],
        completion_lengths: NDArray[np.int64],
        counted_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """Count a forward pass over samples, [S] each.

        The last token of a sample predicts nothing, so it is not computed; token i sees i + 1 keys, its own included.

        Args:
            counted_lengths: completion tokens that are the policy's; None: all are.
        """
        counted = completion_lengths if counted_lengths is None else counted_lengths
        tokens = prompt_lengths + completion_lengths - 1
        pairs = tokens * (tokens + 1) // 2
        counts = (tokens.sum(), pairs.sum(), counted.sum())
        return sum(
            cost * float(count) for cost, count in zip((self.token, self.pair, self.completion), counts, strict=True)
        )

    def prompts(self, lengths: NDArray[np.int64]) -> float:
        """Count the part of prompts in a forward pass."""
        return self.token * float(lengths.sum()) + self.pair * float((lengths * (lengths + 1) // 2).sum())
