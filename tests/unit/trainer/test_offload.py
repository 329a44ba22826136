"""Memory that a real engine of one rank gives to the host: what is freed, and that every bit comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from servicekit.errors import ConfigError, Internal, NotFinite
from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from tests.unit.trainer.test_reference_policy import same, state_of
from tests.unit.trainer.test_steps import overflowing
from trainer_service.checkpoints.parts import values_of
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.step import offload as copies
from trainer_service.step.agreement import RankAgreement
from trainer_service.step.offload import CHECKPOINT, STEP, EngineState, Offload

SAMPLES = make_samples(16)
ALL = ("parameters", "gradients", "optimizer")
CPU = torch.device("cpu")
Make = Callable[..., MegatronEngine]
# The first one imports transformers and writes models: a minute on a busy machine.
pytestmark = pytest.mark.timeout(240)


def all_state(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    with engine._offload.use(*CHECKPOINT, changes=False):
        return state_of(engine)


def held(engine: MegatronEngine) -> dict[str, int]:
    """Bytes that the engine's tensors hold now, by what they are."""
    assert engine._reference is not None
    tensors = {name: values_of(state) for name, state in engine._adam.tensors().items()}
    groups = {
        "parameters": list(engine.tensors().values()),
        "gradients": [parameter.main_grad for parameter in engine._parameters.values()],
        "optimizer": [tensor for name, tensor in tensors.items() if name.startswith(("main/", "exp_avg"))],
        "reference": list(engine._reference.tensors().values()),
    }
    storages = {
        name: {t.untyped_storage()._cdata: t.untyped_storage() for t in found} for name, found in groups.items()
    }
    return {name: sum(storage.nbytes() for storage in found.values()) for name, found in storages.items()}


def life(engine: MegatronEngine, folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """A little of everything, with what it gives; the engine is refreshed, refused a step, saved and restored."""
    seen: list[Any] = []
    for number in range(3):
        seen.append(dict(engine.train_step(make_samples(16, seed=number), NUM_UPDATES).metrics))
        seen += [each.tolist() for each in engine.logprobs(SAMPLES)]
        seen.append(engine.logprobs(SAMPLES, reference=True)[0].tolist())
    engine.save(folder / "checkpoint")
    with pytest.raises(NotFinite):
        engine.train_step(overflowing(-2), NUM_UPDATES)
    seen.append(dict(engine.train_step(SAMPLES, NUM_UPDATES).metrics))
    engine.check_checkpoint(folder / "checkpoint")
    engine.load_checkpoint(folder / "checkpoint")
    seen.append(dict(engine.train_step(SAMPLES, NUM_UPDATES).metrics))
    engine.export(folder / "hf")
    return seen, all_state(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_is_bitwise_as_without(make_engine: Make, tmp_path: Path, dtype: str) -> None:
    settings = {"reference_path": "other", "reference_refresh_every": 2}
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    expected, state = life(make_engine(dtype, **settings), tmp_path / "without")
    found, offloaded = life(make_engine(dtype, offload=ALL, **settings), tmp_path / "with")
    assert found == expected
    assert same(offloaded, state)
    for name in ("checkpoint/shard-tp00-pp00.safetensors", "hf/model.safetensors"):
        tensors = [load_file(tmp_path / way / name) for way in ("without", "with")]
        assert same(*tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", [*ALL, "all"])
def test_what_is_offloaded_holds_no_byte_between_uses(make_engine: Make, dtype: str, what: str) -> None:
    offload = ALL if what == "all" else (what,)
    engine = make_engine(dtype, offload=offload)
    whole = held(make_engine(dtype))
    engine = make_engine(dtype, offload=offload)
    gone = {*offload, *(["reference"] if "parameters" in offload else [])}
    expected = {name: 0 if name in gone else size for name, size in whole.items()}
    assert held(engine)["parameters"] == expected["parameters"]  # loaded
    seconds = engine.train_step(SAMPLES, NUM_UPDATES).seconds
    assert held(engine) == expected
    assert {"onload", "offload"} <= set(seconds)
    engine.logprobs(SAMPLES)
    engine.logprobs(SAMPLES, reference=True)
    assert held(engine) == expected
    with engine.weights():
        assert held(engine) == expected | {"parameters": whole["parameters"]}
    with engine._offload.use(*STEP):
        assert held(engine) == whole | {"reference": expected["reference"]}
    assert (engine._adam._copies is None) == ("optimizer" in offload)


def test_nothing_is_moved_by_default(make_engine: Make) -> None:
    engine = make_engine()
    before = {name: values_of(state).data_ptr() for name, state in engine._adam.tensors().items()}
    seconds = engine.train_step(SAMPLES, NUM_UPDATES).seconds
    assert not {"onload", "offload"} & set(seconds)
    assert {name: values_of(state).data_ptr() for name, state in engine._adam.tensors().items()} == before


def test_no_memory_for_them_is_an_error_that_can_be_repeated(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine().train_step(SAMPLES, NUM_UPDATES).metrics
    engine = make_engine(offload=ALL)
    memory = engine._offload._memory[EngineState.OPTIMIZER]
    with monkeypatch.context() as patch:
        patch.setattr(memory, "sizes", [*memory.sizes[:-1], 2**60])
        says = r"cannot bring parameters, gradients, optimizer back to cpu: they take \d+\.\d\d GiB, and so much is not"
        with pytest.raises(Internal, match=says):
            engine.train_step(SAMPLES, NUM_UPDATES)
        assert set(held(engine).values()) == {0}
    assert engine.train_step(SAMPLES, NUM_UPDATES).metrics == expected


def test_what_cannot_be_written_stays_in_memory(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = [dict(engine.train_step(SAMPLES, NUM_UPDATES).metrics) for _ in range(2)]
    engine = make_engine(offload=["optimizer"])

    def fail(number: int, storage: torch.UntypedStorage) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(engine._offload._memory[EngineState.OPTIMIZER].copies, "store", fail)
        first = engine.train_step(SAMPLES, NUM_UPDATES)
        assert held(engine)["optimizer"] > 0
    second = engine.train_step(SAMPLES, NUM_UPDATES)
    assert [first.metrics, second.metrics] == expected
    assert held(engine)["optimizer"] == 0


def numbers(folder: Path) -> tuple[Offload, torch.Tensor]:
    """A state of two views of one memory, and one of them. No fixture: pytest would print what has no memory."""
    offload, memory = Offload(CPU, folder, RankAgreement(torch.distributed.group.WORLD)), torch.arange(6.0)
    offload.add(EngineState.PARAMETERS, [memory[:2], memory[2:]])
    return offload, memory[2:]


def test_a_block_within_a_block_frees_nothing(one_rank: None, tmp_path: Path) -> None:
    offload, view = numbers(tmp_path)
    with offload.use(EngineState.PARAMETERS):
        with offload.use(EngineState.PARAMETERS, changes=False):
            view += 1
        assert view.untyped_storage().nbytes() == 24
    assert view.untyped_storage().nbytes() == 0
    with offload.use(EngineState.PARAMETERS, changes=False):
        assert view.tolist() == [3, 4, 5, 6]


def test_a_block_that_only_reads_writes_nothing(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, _ = numbers(tmp_path)
    memory = offload._memory[EngineState.PARAMETERS]
    stored: list[int] = []
    monkeypatch.setattr(memory.copies, "store", lambda number, storage: stored.append(number))
    for changes in (True, False, False):
        with offload.use(EngineState.PARAMETERS, changes=changes):
            pass
    assert stored == [0]


def test_a_block_that_fails_frees_too(one_rank: None, tmp_path: Path) -> None:
    offload, view = numbers(tmp_path)
    with pytest.raises(RuntimeError, match="in between"), offload.use(EngineState.PARAMETERS):
        raise RuntimeError("in between")
    assert view.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("kind", ["locked", "file"])
def test_copies_are_bitwise(tmp_path: Path, kind: str) -> None:
    """Of any bytes: a NaN's payload, too."""
    random = np.random.default_rng(0)
    tensors = [torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)) for size in (1, 4096, 70_001)]
    storages = [tensor.clone().untyped_storage() for tensor in tensors]
    sizes = [storage.nbytes() for storage in storages]
    made = copies.FileCopies(sizes, tmp_path) if kind == "file" else copies.LockedCopies(sizes, locked=False)
    for number, storage in enumerate(storages):
        made.store(number, storage)
        storage.resize_(0)
    for number, storage in enumerate(storages):
        storage.resize_(sizes[number])
        copies.bytes_of(storage).fill_(7)
        made.load(number, storage)
    assert all(torch.equal(copies.bytes_of(s), t) for s, t in zip(storages, tensors, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    storage = torch.arange(8).untyped_storage()
    made = copies.FileCopies([64], tmp_path)
    made.store(0, storage)
    made._file.truncate(20)
    with pytest.raises(OSError, match="ends at byte 20"):
        made.load(0, storage)


def test_no_room_on_the_host_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload\.optimizer needs \d+\.00 GiB .* in .*: free disk space"):
        copies.copies_for("optimizer", [2**60], CPU, tmp_path)
    with pytest.raises(ConfigError, match=r"page-locked host memory.*trainer\.offload\.optimizer: false"):
        copies.copies_for("optimizer", [2**60], torch.device("cuda"), None)
