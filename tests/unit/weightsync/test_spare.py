"""A staged shard changes places with the served one, except where somebody else looks at the served memory."""

import pytest
import torch

from servicekit.errors import ConfigError
from weightsync.transfer import spare as spare_module
from weightsync.transfer.spare import SpareShard


def filled(spare: SpareShard, value: float) -> dict[str, torch.Tensor]:
    for tensor in spare.tensors.values():
        tensor.fill_(value)
    return spare.tensors


def test_memory_changes_places_and_the_tensors_stay_what_they_are() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    buffer = torch.zeros(5)
    spare = SpareShard({"parameter": parameter, "buffer": buffer})
    addresses = {name: tensor.data_ptr() for name, tensor in filled(spare, 7.0).items()}
    spare.install()
    assert {"parameter": parameter.data_ptr(), "buffer": buffer.data_ptr()} == addresses
    assert isinstance(parameter, torch.nn.Parameter)
    assert bool((parameter == 7).all())
    assert bool((buffer == 7).all())


def test_the_version_before_is_what_the_next_round_writes_over() -> None:
    served = torch.zeros(4)
    spare = SpareShard({"served": served})
    for version in (1.0, 2.0, 3.0):
        filled(spare, version)
        spare.install()
        assert served.tolist() == [version] * 4
        assert spare.tensors["served"].tolist() == [version - 1] * 4


def test_memory_that_something_else_refers_to_stays_where_it_is() -> None:
    viewed, free = torch.zeros(2, 3), torch.zeros(3)
    transposed = viewed.t()
    aliased = torch.nn.Parameter(torch.zeros(2))
    spare = SpareShard({"viewed": viewed, "free": free, "aliased": aliased.data})
    before = viewed.data_ptr()
    filled(spare, 7.0)
    spare.install()
    assert viewed.data_ptr() == before
    assert bool((transposed == 7).all())
    assert free.tolist() == [7.0] * 3
    assert aliased.tolist() == [7.0] * 2


def test_a_tensor_of_two_names_gets_what_was_staged() -> None:
    tied = torch.zeros(3)
    spare = SpareShard({"embedding": tied, "head": tied})
    filled(spare, 7.0)
    spare.install()
    assert tied.tolist() == [7.0] * 3


def test_memory_is_reserved_before_it_is_needed_or_the_lack_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"a": torch.zeros(2**20), "b": torch.zeros(2**20)}
    monkeypatch.setattr(spare_module, "free_bytes", lambda device: 2**23 - 1)
    with pytest.raises(ConfigError, match=r"rollout-0/0: no room for the spare shard .* takes 0\.01 GiB.*in_place"):
        SpareShard(served).reserve("rollout-0/0")
    monkeypatch.setattr(spare_module, "free_bytes", lambda device: 2**23)
    spare = SpareShard(served)
    spare.reserve("rollout-0/0")
    monkeypatch.setattr(spare_module, "free_bytes", lambda device: 0)
    spare.reserve("rollout-0/0")  # it has it
    assert set(spare.tensors) == set(served)
