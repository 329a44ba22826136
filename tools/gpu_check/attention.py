"""The trainer's core attention on the device, forward and backward, against a dense mask.

Completions that share a prompt, and a context-parallel rank's chunks, have fewer queries than keys: the kernel must
take the last query as that of the last key, and nothing but a GPU can show whether it does.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from tools.gpu_check.services.findings import Findings
from tools.gpu_check.weights import random_spec

# A process that compares imports torch and Megatron in its functions: this one must not.
COMPARED_S = 600.0
HEADS, GROUPS, HEAD_DIM, SCALE = 8, 2, 128, 0.1
# Largest difference of a result or a gradient, as a share of the largest value: three bits of bfloat16's eight.
LIMITS = {"cuda": 2**-5, "cpu": 1e-5}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Samples in one row. context: the ranks that share each sequence."""

    name: str
    share_prompts: bool = False
    context: int = 1


CASES = (
    AttentionCase(name="whole sequences"),
    AttentionCase(name="shared prompts", share_prompts=True),
    AttentionCase(name="context ranks", context=2),
    AttentionCase(name="shared prompts on context ranks", share_prompts=True, context=2),
)


def check_attention(device: str, findings: Findings) -> None:
    """Compare every case, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for case in CASES:
            try:
                wrong, figures = pool.submit(compare, case, device).result(timeout=COMPARED_S)
            except Exception as error:  # noqa: BLE001 - whatever a kernel or a library raises is found
                wrong, figures = [f"{type(error).__name__}: {error}"], {}
            findings.add(f"attention: {case.name}", wrong, **figures)


def compare(case: AttentionCase, device: str) -> tuple[list[str], dict[str, Any]]:
    """Compare a case's results and gradients. Returns: what is wrong, and figures."""
    import torch

    from trainer_service.megatron_engine.attention.core import has_kernel

    torch.manual_seed(0)
    whole = row_of(case)
    tokens = whole.input_ids.size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    of = [
        torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    factor = torch.randn(tokens, HEADS, HEAD_DIM, device=device)
    kernel, wrong = has_kernel(of[0]), []
    if device == "cuda" and not kernel:
        wrong.append("torch's attention for sequences of different lengths is not used")
    got, expected = attended(case, whole, of), dense(whole, of)
    pairs = {"result": (got.float(), expected)}
    ours, theirs = (torch.autograd.grad((out.float() * factor).sum(), of) for out in (got, expected))
    pairs |= {f"{name}'s gradient": (ours[i], theirs[i]) for i, name in enumerate(("query", "key", "value"))}
    worst = 0.0
    for name, (one, other) in pairs.items():
        difference = float((one - other).detach().abs().max() / other.abs().max())
        worst = max(worst, difference)
        if not difference <= LIMITS[device]:
            wrong.append(f"{name} differs by {difference:.3g} of its largest value, more than {LIMITS[device]:.3g}")
    return wrong, {"largest_difference": worst, "kernel": kernel}


def row_of(case: AttentionCase) -> Any:
    """Pack six samples of two prompts, of lengths that are no multiples of a kernel's blocks."""
    from trainer_service.micro_batches.packed import pack
    from trainer_service.micro_batches.samples import Samples

    prompts, completions = np.array([300, 65, 300, 65, 300, 65]), np.array([1, 2, 130, 500, 258, 66])
    samples = Samples(
        sample_ids=tuple("abcdef"),
        update_index=np.zeros(6, np.int64),
        prompt_lengths=prompts,
        completion_lengths=completions,
        token_ids=np.zeros(int((prompts + completions).sum()), np.int64),
        rollout_logprobs=np.zeros(int(completions.sum()), np.float32),
        advantages=np.ones(6, np.float32),
        trainable=np.ones(6, np.bool_),
    )
    multiple = 2 * case.context if case.context > 1 else 1
    return pack(samples, np.arange(6), share_prompts=case.share_prompts, sequence_multiple=multiple)


def attended(case: AttentionCase, whole: Any, of: list[Any]) -> Any:
    """Attend as the trainer does, rank by rank: [T, heads, head_dim]."""
    import torch

    from trainer_service.megatron_engine.attention.core import PackedAttention
    from trainer_service.megatron_engine.attention.packing import RowPacking
    from trainer_service.megatron_engine.build import transformer_config
    from trainer_service.micro_batches.packed import context_share
    from weightsync.layouts.layout import Parallel

    query, key, value = of
    config = transformer_config(random_spec(1, HEADS * HEAD_DIM), Parallel(), query.dtype, False)
    module = PackedAttention(config, 1, None, "self", softmax_scale=SCALE)
    if case.context == 1:
        return module.attend(query, key, value, RowPacking.of(whole, query.device))
    numbered = replace(whole, input_ids=np.arange(whole.input_ids.size)[None])
    shares = [context_share(numbered, rank, case.context) for rank in range(case.context)]
    held = [torch.from_numpy(share.input_ids[0]).to(query.device) for share in shares]
    gathered = torch.cat(held)
    out = [
        module.attend(query[mine], key[gathered], value[gathered], RowPacking.of(share, query.device))
        for mine, share in zip(held, shares, strict=True)
    ]
    return torch.cat(out)[gathered.argsort()]


def dense(whole: Any, of: list[Any]) -> Any:
    """Compute softmax over all tokens of the row, masked, in float32: [T, heads, head_dim]."""
    import torch

    query, key, value = (x.float() for x in of)
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(~torch.from_numpy(mask_of(whole)).to(query.device), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def mask_of(whole: Any) -> Any:
    """Return [T, T]: whether a token attends to another, written out from what a row says of its sequences."""
    mask = np.zeros((whole.input_ids.size,) * 2, np.bool_)
    keys = np.arange(whole.input_ids.size) if whole.keys is None else whole.keys
    first_key = token = 0
    for length, attended_tokens in zip(whole.lengths.tolist(), whole.attended.tolist(), strict=True):
        for own in range(length):
            mask[token + own, keys[first_key : first_key + attended_tokens - length + own + 1]] = True
        first_key, token = first_key + attended_tokens, token + length
    return mask
