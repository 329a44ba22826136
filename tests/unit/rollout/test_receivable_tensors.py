"""What a rollout rank is given: every parameter and persistent buffer of its model, nothing that it derives itself."""

import torch

from rollout_service.sglang_engine.receiver import receivable_tensors
from weightsync.transfer.tensors import poison_tensors


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("on", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("cos_sin_cache", torch.zeros(5), persistent=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.register_buffer("scale", torch.ones(1))


def test_persistent_buffers_are_received_and_caches_are_not() -> None:
    model = Model()
    found = receivable_tensors(model)
    assert set(found) == {"gate.weight", "gate.bias", "gate.places", "gate.on", "scale"} == set(model.state_dict())
    assert found["gate.weight"] is model.gate.weight  # the engine's own: a staged round gives them other memory
    assert found["gate.bias"] is model.gate.bias


def test_the_fill_that_proves_coverage_reaches_buffers_and_whole_numbers() -> None:
    model = Model()
    tensors = receivable_tensors(model)
    assert poison_tensors(tensors) == 5
    assert bool(torch.isnan(model.gate.bias).all())
    assert bool(torch.isnan(model.gate.weight).all())
    assert model.gate.places.tolist() == [torch.iinfo(torch.int64).max] * 4
    assert model.gate.on.tolist() == [True] * 2
    assert model.gate.cos_sin_cache.tolist() == [0.0] * 5
