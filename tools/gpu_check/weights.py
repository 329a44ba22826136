"""The random model of gpu-check, with values that depend on their place in the model."""

import zlib
from typing import Any


def random_spec(layers: int, hidden: int, experts: int = 0) -> Any:
    """Make the sizes of a dense model, or of a mixture of small experts with half as many layers.

    24 layers of 1,024 are 0.6 B parameters; 12 with 64 experts 0.7 B.
    """
    from weightsync.model.spec import ModelSpec

    mixture = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": max(1, layers // 2),
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * hidden // 16,
        "norm_topk_prob": True,
    }
    return ModelSpec.from_config(
        {
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": hidden // 8,
            "vocab_size": 98 * hidden,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
        | (mixture if experts > 0 else {})
    )


def numbered(layout: Any, rank: int) -> dict[str, Any]:
    """Make a rank's parameters (bfloat16, CPU); every element is a function of its place in the whole model.

    Places are hashed as integers, because float32 cannot tell neighbours beyond 2^24 apart.
    """
    import torch

    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layout.parameters_of(rank).items()}
    for shard in layout.shards[layout.shards["rank"] == rank]:
        name = layout.tensors[shard["tensor"]]
        cols = int(layout.tensor_shapes[shard["tensor"]][1])
        row, height, col, width, at_row, at_col = (
            int(shard[field]) for field in ("row", "rows", "col", "cols", "param_row", "param_col")
        )
        places = torch.arange(row, row + height)[:, None] * cols + torch.arange(col, col + width)[None, :]
        part = tensors[layout.params[shard["param"]]]
        matrix = part.view(-1, 1) if part.dim() == 1 else part.view(-1, part.shape[-1])
        values = ((places * 40_503 + zlib.crc32(name.encode())) % 65_521) / 65_521 - 0.5
        matrix[at_row : at_row + height, at_col : at_col + width] = values.to(torch.bfloat16)
    return tensors
