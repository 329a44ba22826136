"""Batched torch attention for CPUs: SGLang's `torch_native` backend without its loop over sequences.

The upstream backend calls scaled_dot_product_attention once per sequence and layer (its own TODO); with hundreds of
short sequences that loop is most of a decode step. Here sequences of similar length are padded together, within a bound
on the padded size, and one call serves them all (padding.py).
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from rollout_service.sglang_cpu.padding import MAX_CHUNK_MASK, AttentionChunk, attend, decode_chunks, extend_chunks


def register() -> None:
    """Register the backend under the name `torch_native`, which SGLang tests in several places."""
    register_attention_backend("torch_native")(BatchedTorchAttention)


class BatchedTorchAttention(TorchNativeAttnBackend):
    """Decoder self-attention in padded chunks; everything else (sliding window, cross attention) is upstream's."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward pass; its first layer plans the chunks."""
        super().init_forward_metadata(forward_batch)
        self.chunks: dict[
            bool, list[AttentionChunk]
        ] = {}  # is_extend -> chunks; the same for every layer of this forward

    def _run_sdpa_forward_decode(self, query: torch.Tensor, output: torch.Tensor, *cache: Any, **options: Any) -> Any:
        k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = cache
        if encoder_lens is not None or _is_special(options):
            return super()._run_sdpa_forward_decode(query, output, *cache, **options)
        if False not in self.chunks:
            self.chunks[False] = decode_chunks(req_to_token, req_pool_indices, seq_lens)
        for chunk in self.chunks[False]:
            part = attend(query[chunk.index_NQ], k_cache, v_cache, chunk, options["scaling"])
            output[chunk.index_NQ] = part
        return output

    def _run_sdpa_forward_extend(self, query: torch.Tensor, output: torch.Tensor, *cache: Any, **options: Any) -> Any:
        k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefix_lens, extend_lens, encoder_lens = cache
        if encoder_lens is not None or _is_special(options) or not options["causal"]:
            return super()._run_sdpa_forward_extend(query, output, *cache, **options)
        if int((extend_lens * seq_lens).max()) > MAX_CHUNK_MASK:
            return super()._run_sdpa_forward_extend(query, output, *cache, **options)
        if True not in self.chunks:
            self.chunks[True] = extend_chunks(req_to_token, req_pool_indices, seq_lens, prefix_lens, extend_lens)
        for chunk in self.chunks[True]:
            valid_NQ = chunk.index_NQ >= 0
            part = attend(query[chunk.index_NQ.clamp(min=0)], k_cache, v_cache, chunk, options["scaling"])
            output[chunk.index_NQ[valid_NQ]] = part[valid_NQ]
        return output


def _is_special(options: dict[str, Any]) -> bool:
    return bool(options.get("is_cross_attn")) or options.get("sliding_window_size") is not None
