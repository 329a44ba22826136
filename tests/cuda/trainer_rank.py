"""Trainer ranks on GPUs that are not there: a train step and log-probs, and which device every operation was on.

`python -m tests.cuda.trainer_rank CASES`, a JSON list of {config, trainer, rank, dtype, plant}; prints a line of JSON
with an answer for each. megatron-core and our engine run as on GPUs, forward and backward, on fake CUDA tensors and
fake process groups. autograd asks the driver for each device's context and stream before a backward pass, and fails
there without one: `autograd_without_driver.c`, loaded ahead of torch, answers that there is no accelerator; and all of
a backward pass runs in the thread that asks for it, because torch starts autograd's threads for real devices only.

Left out: everything that depends on a value (every number that is read is 0, and so experts get no tokens, and a stage
is told the shape that it will receive: `tell_shapes`); what streams and events order; a checkpoint's bytes (zeros are
written, by rank 0 alone: the others' files wait for its folder); interleaved stages, of several chunks' shapes.
"""

import contextlib
import json
import math
import multiprocessing
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem_config.schema import RunConfig
from tests.cuda.fake_tensors import Recorded, fake_cuda
from trainer_service.checkpoints.parts import values_of
from trainer_service.micro_batches.samples import Samples, span_indices, starts
from weightsync.transfer.spare import SpareShard

DEVICE = torch.device("cuda", 3)  # not 0: what names no device would be there
CURRENT = threading.local()  # CUDA's current device is each thread's own, and 0 at first
# a copy between two devices is meant as such
COPIES = ("aten.copy_.default", "aten._foreach_copy_.default")


class _Inert:
    """A stream or event of a device that is not there."""

    cuda_stream = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer what is asked of torch.cuda. Returns: the devices that were waited for."""
    waited: list[str] = []

    def current_device() -> int:
        return getattr(CURRENT, "index", 0)

    def set_device(device: Any) -> None:
        CURRENT.index = torch.device(device).index if not isinstance(device, int) else device

    def synchronize(device: Any = None) -> None:
        waited.append(str(torch.device("cuda", current_device()) if device is None else device))

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": current_device,
        "set_device": set_device,
        "synchronize": synchronize,
        "get_device_capability": lambda *_: (9, 0),
        "manual_seed": lambda *_: None,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "empty_cache": lambda: None,
        "Stream": _Inert,
        "Event": _Inert,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": _Inert,
        "default_stream": _Inert,
        "is_current_stream_capturing": lambda: False,
        "_lazy_call": lambda function, **_: function(),
        "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch, "tensor", _tensor_on_current(torch.tensor))
    monkeypatch.setattr(torch.Tensor, "cuda", _to_current)
    return waited


def _to_current(self: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    """Tensor.cuda() asks the driver as well."""
    return self.to(torch.device("cuda", torch.cuda.current_device()) if device is None else device)


def _tensor_on_current(tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor(..., device="cuda") asks the driver for the current device, not torch.cuda."""

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked = None if device is None else torch.device(device)
        if asked is not None and asked.type == "cuda" and asked.index is None:
            asked = torch.device("cuda", torch.cuda.current_device())
        return tensor(*args, device=asked, **kwargs)

    return make


def pretend_world(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """torch.distributed's groups are fake ones."""
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"}))
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def pretend_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch cannot do with fake tensors, done by other means."""
    import megatron.core.optimizer.clip_grads as norms
    import megatron.core.tensor_parallel.random as states
    from megatron.core.models.gpt import GPTModel

    from trainer_service.checkpoints import writing
    from weightsync.transfer import tensors

    monkeypatch.setattr(states, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(states, "_set_cuda_rng_state", lambda *_, **__: None)
    monkeypatch.setattr(norms, "l2_norm_impl", lambda *_: (torch.zeros(1, device="cuda"), None))  # reads every norm
    monkeypatch.setattr(GPTModel, "to", _to)
    monkeypatch.setattr(GPTModel, "bfloat16", lambda self: self)  # its parameters are so already
    numpy = torch.Tensor.numpy

    def zeros(fake: torch.Tensor) -> torch.Tensor:
        return torch.zeros(fake.shape, dtype=fake.dtype) if isinstance(fake, FakeTensor) else fake

    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: numpy(zeros(self)))
    memory_of = tensors.memory_of
    monkeypatch.setattr(tensors, "memory_of", lambda tensor: memory_of(zeros(tensor)))
    monkeypatch.setattr(
        writing,
        "save_file",
        lambda held, path, **kwargs: save_file({name: zeros(t) for name, t in held.items()}, path, **kwargs),
    )


def _to(self: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """As Module.to, which cannot put a fake tensor into a parameter of the CPU."""
    for module in self.modules():
        for name, each in list(module._parameters.items()):
            if each is not None and each.device != device:
                moved = torch.nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device=device))
                moved.__dict__.update(each.__dict__)
                module._parameters[name] = moved
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return self


def tell_shapes(monkeypatch: pytest.MonkeyPatch, hidden_size: int, split: int) -> None:
    """Stages tell each other a micro-batch's shape, which would be read as zeros: all of a call have the first's.

    split: ranks that share a micro-batch's columns between layers.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from trainer_service.megatron_engine.backend import MegatronBackend

    shape: list[int] = []
    through, communicate = MegatronBackend._through, P2PCommunicator._communicate_shapes

    def noted(self: MegatronBackend, batches: Any, *args: Any, **kwargs: Any) -> None:
        shapes = {tuple(batch.input_ids.shape) for batch in batches}
        assert len(shapes) == 1, f"micro-batches of several shapes: {shapes}"
        rows, columns = shapes.pop()
        shape[:] = [columns // split, rows, hidden_size]
        through(self, batches, *args, **kwargs)

    def told(*args: Any, **kwargs: Any) -> Any:
        communicate(*args, **kwargs)
        return list(shape), list(shape)

    monkeypatch.setattr(MegatronBackend, "_through", noted)
    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", told)


def note_micro_batches(monkeypatch: pytest.MonkeyPatch, recorded: Recorded) -> list[tuple[str, str]]:
    """Returns: what the host waits for while micro-batches run, as (operation, place); filled as they do."""
    from trainer_service.megatron_engine.backend import MegatronBackend

    waits: list[tuple[str, str]] = []
    through = MegatronBackend._through

    def noted(*args: Any, **kwargs: Any) -> None:
        before = len(recorded.operations)
        through(*args, **kwargs)
        waits.extend((each.name, each.where) for each in recorded.operations[before:] if each.waits)

    monkeypatch.setattr(MegatronBackend, "_through", noted)
    return waits


def wait_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: the number of a micro-batch's tokens is copied to the device."""
    from trainer_service.step.token_loss import TokenState

    def wrong(self: TokenState, name: str, amount: int) -> None:
        self._add(name, torch.tensor(amount, device=self.weights.device))

    monkeypatch.setattr(TokenState, "_count", wrong)


def forget_a_move(monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """A planted mistake: a step's advantages are on another device than the rest."""
    from trainer_service.step.token_loss import TokenState

    right = TokenState.of

    def wrong(*args: Any) -> TokenState:
        state = right(*args)
        return replace(state, advantages=torch.empty(state.advantages.shape, device=to))

    monkeypatch.setattr(TokenState, "of", wrong)


def leave_a_gradient(monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """A planted mistake: the loss's own backward pass makes its gradient on another device."""
    from trainer_service.megatron_engine.head.logprobs import _LogprobEntropy

    right = _LogprobEntropy.backward

    def wrong(ctx: Any, *grads: Any) -> Any:
        gradient, *rest = right(ctx, *grads)
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=to), *rest

    monkeypatch.setattr(_LogprobEntropy, "backward", staticmethod(wrong))


def samples(vocabulary: int, *, alike: bool) -> Samples:
    """16 of two updates, four of each prompt; alike: of the same lengths."""
    rng, count = np.random.default_rng(0), 16
    group = np.arange(count) // 4
    prompts, completions = rng.integers(4, 20, count)[group], rng.integers(2, 30, count)
    if alike:
        prompts, completions = np.full(count, 12), np.full(count, 20)
    lengths = prompts + completions
    ids = rng.integers(0, vocabulary, int(lengths.sum()))
    of_prompt = span_indices(starts(lengths), prompts)
    ids[of_prompt] = np.repeat(group, prompts)
    return Samples(
        sample_ids=tuple(f"s{i}" for i in range(count)),
        update_index=np.repeat([0, 1], count // 2).astype(np.int64),
        prompt_lengths=prompts.astype(np.int64),
        completion_lengths=completions.astype(np.int64),
        token_ids=ids.astype(np.int64),
        rollout_logprobs=-rng.random(int(completions.sum())).astype(np.float32),
        advantages=rng.standard_normal(count).astype(np.float32),
        trainable=np.ones(count, np.bool_),
    )


def run_config(case: dict[str, Any], folder: Path) -> RunConfig:
    """Every term of the loss takes part: clipping, truncated importance weights, entropy, temperature."""
    (folder / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": case["dtype"]},
            "data": {"train": "unused.jsonl"},
            "grpo": {
                "updates_per_iteration": 2,
                "old_logprobs": "recompute",
                "entropy_coefficient": 0.01,
                "correction": "tis",
                "correction_high": 2.0,
                "dual_clip": 3.0,
                "temperature": 0.7,
            },
            # the norm is read as 0: all of it is clipped
            "trainer": {"max_tokens_per_micro_batch": 256, "clip_grad": 1e-9, "peak_tflops": 989} | case["trainer"],
        }
    )


def work(config: RunConfig, folder: Path, answer: dict[str, Any]) -> None:
    """A step, log-probs, a checkpoint there and back, and a staged round that takes the place of the weights."""
    from trainer_service.megatron_engine.engine import MegatronEngine

    engine = MegatronEngine(config, DEVICE)
    parameters = engine.tensors()
    answer["parameters"] = {name: [list(t.shape), str(t.device)] for name, t in parameters.items()}
    rows = samples(engine.spec.vocab_size, alike=engine.parallel.pipeline > 1)
    answer["seconds"] = sorted(engine.train_step(rows, 2).seconds)
    logprobs, entropies = engine.logprobs(rows)
    answer["shapes"] = [list(logprobs.shape), list(entropies.shape), [rows.num_completion_tokens]]
    groups = engine._backend.optimizer.param_groups
    counts = [values_of(held) for name, held in engine._adam.tensors().items() if name.startswith("step/")]
    answer["adamw"] = [all(group["fused"] for group in groups), sorted({str(each.device) for each in counts})]
    answer["gradients"] = sorted(
        name for name, each in engine._parameters.items() if str(each.main_grad.device) == str(DEVICE)
    )
    if dist.get_rank() == 0:
        engine.save(folder / "checkpoint")
        answer["saved"] = sorted(path.name for path in (folder / "checkpoint").iterdir())
        engine.load_checkpoint(folder / "checkpoint")
    spare = SpareShard(parameters)
    spare.reserve("rollout-0/0")
    spare.install()
    answer["staged"] = {name: [list(t.shape), str(t.device)] for name, t in spare.tensors.items()}


def summary(recorded: Recorded) -> dict[str, Any]:
    """Operations by device; mixes by operation, devices and line."""
    mixes = Counter(
        (each.name, each.devices, each.where)
        for each in recorded.mixed()
        if each.name not in COPIES and not each.beside_numbers
    )
    devices = {device for each in recorded.operations for device in each.devices + each.made}
    return {
        "stepped": sorted({each.name for each in recorded.operations if "adam" in each.name or "addcdiv" in each.name}),
        "devices": {device: recorded.on(device) for device in sorted(devices)},
        "mixes": [[name, list(dict.fromkeys(found)), where, count] for (name, found, where), count in mixes.items()],
    }


def describe(case: dict[str, Any]) -> dict[str, Any]:
    """{error, devices, mixes, waited, parameters, ...} of one rank."""
    sizes = case["trainer"]
    world_size = math.prod(sizes.get(f"{axis}_parallel", 1) for axis in ("tensor", "data", "pipeline", "context"))
    answer: dict[str, Any] = {"error": None}
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        waited = pretend_gpus(monkeypatch)
        pretend_world(monkeypatch, case["rank"], world_size)
        if case.get("plant") != "no device set":
            torch.cuda.set_device(DEVICE)  # as world.connect does, in the thread that all of it runs in
        with fake_cuda(monkeypatch, read_as=0.0) as recorded:
            pretend_megatron(monkeypatch)
            config = run_config(case, Path(folder))
            if sizes.get("pipeline_parallel", 1) > 1:
                split = sizes["tensor_parallel"] if sizes.get("sequence_parallel") else 1
                tell_shapes(monkeypatch, case["config"]["hidden_size"], split)
            if str(case.get("plant")).startswith(("cpu", "cuda")):
                forget_a_move(monkeypatch, case["plant"])
            host_waits = note_micro_batches(monkeypatch, recorded)
            if case.get("plant") == "a number":
                wait_for_a_number(monkeypatch)
            if case.get("plant") == "gradient":
                leave_a_gradient(monkeypatch, "cuda:5")
            try:
                # its workers are started for real devices only
                with torch.autograd.set_multithreading_enabled(False):
                    work(config, Path(folder), answer)
            except Exception:  # noqa: BLE001 - the answer's reader judges it
                answer["error"] = traceback.format_exc(limit=-12)
        answer["host_waits"] = sorted(set(host_waits))
        answer["operations"] = sorted({each.name for each in recorded.operations})
        return answer | summary(recorded) | {"waited": sorted(set(waited))}


def describe_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A forked process for each, because megatron-core keeps much in globals."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpus(monkeypatch)  # or the engine prepares megatron-core for a CPU
        from trainer_service.megatron_engine import ON_CPU, engine  # noqa: F401

        assert not ON_CPU
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            return pool.map(describe, cases, chunksize=1)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answers = describe_all(json.loads(sys.argv[1]))
    print(json.dumps(answers))
