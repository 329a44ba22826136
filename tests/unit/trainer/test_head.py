"""The output layer in chunks against all logits together: values, gradients, and the bytes that each holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.live_bytes import LiveBytes
from trainer_service.megatron_engine.head.logprobs import VocabShard, _multiply, logprob_entropy
from trainer_service.micro_batches import chunks
from trainer_service.micro_batches.chunks import chunk_tokens

HIDDEN, VOCAB, PADDED = 6, 23, 26
ALONE = dist.ProcessGroup(0, 1)
Both = tuple[Tensor, Tensor]


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight as mcore's DDP has it, targets, and a factor of each result in the loss."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32), requires_grad=False)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(2, tokens, generator=generator, dtype=torch.float64)


def full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int = VOCAB) -> Both:
    """All logits together, in float32 at least."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight[:vocab].to(wide).t()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int) -> Both:
    shard = VocabShard(group=ALONE, first=0, real=VOCAB, temperature=temperature)
    return logprob_entropy(hidden, weight, targets, shard, chunk)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("tokens", "chunk"), [(17, 17), (17, 5), (17, 1), (16, 8), (1, 1), (1, 9), (0, 4)])
def test_equals_all_logits_together(tokens: int, chunk: int, temperature: float) -> None:
    hidden, weight, targets, factors = inputs(tokens)
    expected = full(hidden, weight, targets, temperature)
    got = in_chunks(hidden, weight, targets, temperature, chunk)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    wanted = torch.autograd.grad((torch.stack(expected) * factors).sum(), (hidden, weight))
    of_hidden, of_weight = torch.autograd.grad((torch.stack(got) * factors).sum(), (hidden, weight))
    torch.testing.assert_close(of_hidden, wanted[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(of_weight + weight.main_grad, wanted[1], rtol=0, atol=1e-13)
    assert not of_weight[VOCAB:].any()


@pytest.mark.parametrize("asked", [0, 1])
def test_one_result_alone_has_its_gradient(asked: int) -> None:
    hidden, weight, targets, factors = inputs(9)
    wanted = torch.autograd.grad((full(hidden, weight, targets, 0.8)[asked] * factors[0]).sum(), (hidden, weight))
    got = in_chunks(hidden, weight, targets, 0.8, 4)[asked]
    of_hidden, of_weight = torch.autograd.grad((got * factors[0]).sum(), (hidden, weight))
    torch.testing.assert_close(of_hidden, wanted[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(of_weight + weight.main_grad, wanted[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [2, 7])
def test_gradients_by_finite_differences(chunk: int) -> None:
    hidden, weight, targets, _ = inputs(7)

    def results(hidden: Tensor) -> Both:
        return in_chunks(hidden, weight, targets, 0.9, chunk)

    assert torch.autograd.gradcheck(results, (hidden,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_rounding_only(dtype: torch.dtype) -> None:
    """bfloat16: the gradient of the logits is rounded, before it is multiplied, and all else is float32."""
    hidden, weight, targets, factors = inputs(50, dtype)
    expected, got = full(hidden, weight, targets, 0.9), in_chunks(hidden, weight, targets, 0.9, 8)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad((torch.stack(expected) * factors).sum(), (hidden, weight))
    of_hidden, of_weight = torch.autograd.grad((torch.stack(got) * factors).sum(), (hidden, weight))
    near = 2e-6 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(of_hidden, wanted[0], rtol=near, atol=near)
    torch.testing.assert_close(of_weight + weight.main_grad, wanted[1].float(), rtol=near, atol=near)


@pytest.mark.parametrize("chunk", [9, 4])
def test_logits_in_bfloat16_are_not_rounded(chunk: int) -> None:
    """Logits of about 32, where bfloat16 has a step of 0.25."""
    hidden, weight, targets, _ = inputs(9, torch.bfloat16)
    with torch.no_grad():
        hidden[:, 0] = 8.0
        weight[:, 0] += 4.0
    exact = full(hidden.double(), weight.double(), targets, 1.0)
    rounded = (hidden @ weight[:VOCAB].t()).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert float((rounded - exact[0]).detach().abs().max()) > 0.05
    for one, other in zip(in_chunks(hidden, weight, targets, 1.0, chunk), exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


class _Made(TorchDispatchMode):  # type: ignore[misc]
    """Operators, with the type and columns of what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2:
            self.seen.add((str(func), out.dtype, out.shape[1]))
        return out


def test_a_gpu_multiplies_bfloat16_into_float32() -> None:
    """On tensors of a GPU that is not there, no logits are in bfloat16, not even for a moment."""
    torch._C._ensureCUDADeviceGuardSet()
    made = _Made()
    with FakeTensorMode(), torch.no_grad(), made:
        hidden, weight = (torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in (9, PADDED))
        _multiply(hidden, weight)
    products = {(name, dtype) for name, dtype, columns in made.seen if columns == PADDED and name != "aten.t.default"}
    assert products == {("aten.mm.dtype", torch.float32)}


@pytest.mark.parametrize(("tokens", "columns", "chunk"), [(1024, 2**20, 128), (1000, 2**20, 125), (3, 2**40, 1)])
def test_chunks_are_even_and_within_the_limit(tokens: int, columns: int, chunk: int) -> None:
    assert chunk_tokens(tokens, columns) == chunk
    assert 4 * columns * chunk <= chunks.CHUNK_BYTES or chunk == 1


# Qwen2.5-0.5B
WIDE, DEEP, TOKENS = 151_936, 896, 2048


def peak_bytes(compute: Callable[[Tensor, Tensor, Tensor], Both], dtype: torch.dtype) -> int:
    """Most bytes beyond the inputs and the gradient's buffer, forward and backward, with both results in the loss.

    Tensors without data have the sizes and the lives of others, and take no time.
    """
    hidden = torch.empty(TOKENS, DEEP, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(WIDE, DEEP, dtype=dtype, device="meta", requires_grad=True)
    weight.main_grad = torch.empty(WIDE, DEEP, device="meta")
    targets = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    live = LiveBytes()
    with live:
        logprobs, entropies = compute(hidden, weight, targets)
        (logprobs.sum() + entropies.sum()).backward()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_chunks_at_most_at_a_vocabulary_of_151936(dtype: torch.dtype) -> None:
    chunk = chunk_tokens(TOKENS, WIDE)
    shard = VocabShard(group=ALONE, first=0, real=WIDE, temperature=0.9)
    # the gradient of the hidden states, and some numbers of each token
    by_token = TOKENS * DEEP * dtype.itemsize + 128 * TOKENS
    # float32: one chunk beside the weight's gradient, which autograd needs as a tensor, is more than two chunks
    allowed = max(2 * chunk * WIDE * 4, (chunk + DEEP) * WIDE * dtype.itemsize)

    peak = peak_bytes(lambda h, w, targets: logprob_entropy(h, w, targets, shard, chunk), dtype)
    whole = peak_bytes(lambda h, w, targets: full(h, w, targets, 0.9, WIDE), dtype)
    assert peak <= allowed + by_token
    assert whole > 2 * (allowed + by_token)
