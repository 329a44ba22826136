"""One trainer rank of the real engine on CUDA tensors that are not there: what it holds, and its forward pass's peak.

    python -m tests.cuda.megatron_memory '{"model": {config.json}, "trainer": {settings}, "dtype": "bfloat16"}'

prints {"resident": bytes, "peak": bytes}: the sum of the fake tensors' storages once the engine is made, and the most
until the first micro-batch's backward pass would begin (torch has none on fake CUDA tensors). With "grpo": {settings}
instead {"host": bytes, "saved": bytes}: page-locked memory as torch's allocator rounds it, of an engine that remembers
a step, and of a checkpoint's copy. Process groups are fake too. A program of its own: it changes torch.cuda for good.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tandem_config.schema import RunConfig
from trainer_service.micro_batches.samples import Samples

ROW = 1024  # tokens of each sample; one in eight is its prompt's
_LARGE = 2**16  # bytes of a new tensor that can make a new peak worth counting


class ForwardDone(Exception):
    """The backward pass would begin."""


class _Inert:
    """A stream, an event, a guard."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: True


class CountedFakes(TorchDispatchMode):
    """Every tensor on a CUDA device is a fake one, and the bytes of its storage are counted while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.locked = 0  # as ATen/core/CachingHostAllocator.h rounds each request

    def total(self) -> int:
        """Bytes of the storages that live."""
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            with self._fake:
                tensor = func(*args, **kwargs)
            self.locked += 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes > 0 else 0
            return tensor
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        fakes = [each for each in tensors if isinstance(each, FakeTensor)]
        if not fakes and not any(isinstance(each, torch.device) and each.type == "cuda" for each in leaves):
            return func(*args, **kwargs)
        for each in fakes:
            each.constant = None
        with self._fake:
            if tensors and not fakes:  # a copy to the device
                dtype = kwargs.get("dtype") or tensors[0].dtype
                out = torch.empty(tensors[0].shape, dtype=dtype, device=kwargs["device"])
            else:
                out = func(*args, **kwargs)
        self._count([each for each in pytree.tree_leaves(out) if isinstance(each, FakeTensor)])
        return out

    def _count(self, made: list[FakeTensor]) -> None:
        large = False
        for tensor in made:
            tensor.constant = None
            storage = tensor.untyped_storage()
            known = self._live.get(storage._cdata)
            if tensor.device.type == "cuda" and (known is None or known[0].expired()):
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                large = large or storage.nbytes() >= _LARGE
        if large:
            self.peak = max(self.peak, self.total())


def _unpinned(make: Any) -> Any:
    """torch.tensor, which could pin memory for no device."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def _nothing() -> Any:
    """Another function each time: torch tells its own apart by their identity."""
    return lambda *_, **__: None


def pretend_cuda() -> None:
    """Make torch.cuda look like one H100 whose calls do nothing."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "is_current_stream_capturing": lambda: False,
        "max_memory_allocated": lambda *_: 0,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: _Inert(),
        "default_stream": lambda *_: _Inert(),
        "Stream": _Inert,
        "Event": _Inert,
        "_lazy_call": lambda call, **_: call(),
    }
    silent = ("set_device", "_lazy_init", "synchronize", "empty_cache", "manual_seed", "set_rng_state")
    for name in (*silent, "reset_peak_memory_stats"):
        answers[name] = _nothing()
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    names: Any = torch
    names.tensor = _unpinned(torch.tensor)
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)


def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, scale: float | None = None, **options: Any
) -> Any:
    """What a GPU would choose: flash attention without a mask; with one, and grouped heads, no fused kernel."""
    if attn_mask is not None:
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, 0.0, False, None, scale=scale, **options)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]


def _to(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """As Module.to moves parameters and buffers; it would give real ones fake data."""
    for each in module.modules():
        for name, old in list(each._parameters.items()):
            if old is not None and old.device.type == "cpu":
                new = torch.nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device))
                new.__dict__.update(old.__dict__)
                each._parameters[name] = new
        for name, buffer in list(each._buffers.items()):
            if buffer is not None and buffer.device.type == "cpu":
                each._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return module


def configuration(case: dict[str, Any], folder: Path) -> RunConfig:
    """One update of one iteration, without a forward pass for old log-probs."""
    (folder / "config.json").write_text(json.dumps(case["model"]), encoding="utf-8")
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": case["dtype"]},
            "data": {"train": "unused", "max_prompt_tokens": ROW // 8},
            "grpo": {"updates_per_iteration": 1, "old_logprobs": "rollout", "max_new_tokens": ROW - ROW // 8}
            | case.get("grpo", {}),
            "trainer": {"peak_tflops": 989} | case["trainer"],  # there is nothing to measure
        }
    )


def full_micro_batch(config: RunConfig) -> Samples:
    """One for each data-parallel rank."""
    count = config.trainer.max_tokens_per_micro_batch // ROW * config.trainer.data_parallel
    prompts = np.full(count, ROW // 8, np.int64)
    completions = ROW - prompts
    return Samples(
        sample_ids=tuple(f"s{index}" for index in range(count)),
        update_index=np.zeros(count, np.int64),
        prompt_lengths=prompts,
        completion_lengths=completions,
        token_ids=np.ones(count * ROW, np.int64),
        rollout_logprobs=np.full(int(completions.sum()), -1.0, np.float32),
        advantages=np.ones(count, np.float32),
        trainable=np.ones(count, np.bool_),
    )


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Make the engine, and train until the first backward pass."""
    pretend_cuda()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(case, Path(folder))
        dist.init_process_group("fake", rank=0, world_size=config.trainer.world_size, store=FakeStore())
        new_group = dist.new_group
        names: Any = dist
        names.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
        functional: Any = F
        functional.scaled_dot_product_attention = _attention

        def forward_done(*_: Any, **__: Any) -> None:
            raise ForwardDone

        names = torch.autograd
        names.backward = forward_done
        counted, device = CountedFakes(), torch.device("cuda", 0)
        with counted:
            if "grpo" not in case:
                return _measured(config, counted)
            names = torch.UntypedStorage
            own = names.device
            # those of fakes say "meta", and what is offloaded is the device's
            names.device = property(
                lambda storage: device if own.__get__(storage).type == "meta" else own.__get__(storage)
            )
            return _on_host(_made(config), counted)


def _made(config: RunConfig) -> Any:
    """The engine."""
    import megatron.core.tensor_parallel.random as megatron_random

    from trainer_service.megatron_engine import build, engine

    names: Any = megatron_random
    names._get_cuda_rng_state = torch.cuda.get_rng_state
    names._set_cuda_rng_state = torch.cuda.set_rng_state
    names = build
    names.PolicyModel.to, names.PolicyModel.bfloat16 = _to, lambda self: self
    return engine.MegatronEngine(config, torch.device("cuda", 0))


def _on_host(made: Any, counted: CountedFakes) -> dict[str, int]:
    from trainer_service.checkpoints.writing import HostCopies
    from trainer_service.megatron_engine import checkpoint
    from trainer_service.megatron_engine.zero import gathered

    made._adam.remember()
    host = counted.locked
    meta = {"policy_version": 1, "reference": made._refreshes, "optimizer": True, "extra": True}
    held = made._tensors_in(meta)
    files = checkpoint._files(checkpoint._whole(held), meta, made._device)
    copies = HostCopies()
    for taken in (copies.take(files, gathered(held)), copies.take(files, gathered(held))):  # kept for the second
        assert all(tensor.device.type == "cpu" for file in taken for tensor in file.tensors.values())
    return {"host": host, "saved": counted.locked - host}


def _measured(config: RunConfig, counted: CountedFakes) -> dict[str, int]:
    made = _made(config)
    resident = counted.total()
    counted.peak = 0
    with contextlib.suppress(ForwardDone):
        made.train_step(full_micro_batch(config), 1)
        raise RuntimeError("the step went on without a backward pass")
    return {"resident": resident, "peak": counted.peak}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
