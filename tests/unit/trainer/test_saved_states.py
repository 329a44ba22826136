"""A rank of any layout fills its tensors from a checkpoint of any other: bitwise, and nothing else is read."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servicekit.errors import ConfigError
from tests.kit.checkpoints import read_rank, unread, write_trainer_checkpoint
from tests.kit.stores import Tensors, canonical_tensors, cut, same, tiny_spec
from tests.unit.weightsync.test_layouts import moe_spec
from trainer_service.checkpoints.parts import FlatPart, values_of
from trainer_service.checkpoints.shards import SavedShards
from trainer_service.checkpoints.states import SavedStates
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec

# 33 rows of the vocabulary: one is padding under TP 2, three are under TP 4.
DENSE = (
    Parallel(),
    Parallel(tensor=2),
    Parallel(tensor=4),
    Parallel(data=2),
    Parallel(tensor=2, pipeline=2),
    Parallel(pipeline=2, virtual_pipeline=2),
    Parallel(pipeline=2, first_stage_layers=1),
    Parallel(tensor=2, data=2, context=2),
)
EXPERTS = (
    Parallel(),
    Parallel(data=2, expert=2),
    Parallel(data=2, expert_tensor=2),
    Parallel(data=2, pipeline=2, expert=2),
    Parallel(tensor=2, data=2, expert=2, expert_tensor=2),
)
MODELS = {
    "untied": (tiny_spec(), DENSE),
    "tied": (tiny_spec("qwen2", tie_word_embeddings=True), DENSE),
    "experts": (moe_spec(), EXPERTS),
}
MOMENTS = ("main", "exp_avg", "exp_avg_sq")


def canonical(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensors]:
    """By kind; no two kinds have an element in common."""
    full = {kind: canonical_tensors(spec, seed) for seed, kind in enumerate(MOMENTS)}
    return {"weights": {name: tensor.to(dtype) for name, tensor in full["main"].items()}} | full


def expected(spec: ModelSpec, parallel: Parallel, rank: int, full: dict[str, Tensors]) -> Tensors:
    """What a rank must hold by kind and name."""
    layout = megatron_layout(spec, parallel)
    tensors: Tensors = {}
    for kind, named in full.items():
        held = cut(layout, rank, named, torch.bfloat16 if kind == "weights" else torch.float32)
        tensors |= {f"{kind}/{name}": tensor for name, tensor in held.items()}
        tensors |= {f"step/{name}": torch.tensor(7.0) for name in held}
    return tensors


def save(folder: Path, spec: ModelSpec, parallel: Parallel) -> dict[str, Tensors]:
    full = canonical(spec, torch.bfloat16)
    moments = {kind: full[kind] for kind in MOMENTS}
    write_trainer_checkpoint(folder, spec, parallel, full["weights"], step=7.0, **moments)
    return full


def fill(folder: Path, spec: ModelSpec, parallel: Parallel, rank: int) -> Tensors:
    return read_rank(folder, spec, parallel, rank, unread(spec, parallel, rank, torch.bfloat16))


EVERY = [(model, number) for model in MODELS for number in range(len(MODELS[model][1]))]


@pytest.mark.parametrize(("model", "number"), EVERY)
def test_every_layout_is_read_by_two_others_bitwise(tmp_path: Path, model: str, number: int) -> None:
    layouts = MODELS[model][1]
    read_at(tmp_path, model, number, tuple(layouts[(number + step) % len(layouts)] for step in (1, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "number"), EVERY)
def test_every_layout_reads_every_other_bitwise(tmp_path: Path, model: str, number: int) -> None:
    read_at(tmp_path, model, number, MODELS[model][1])


def read_at(tmp_path: Path, model: str, number: int, targets: tuple[Parallel, ...]) -> None:
    """Save at one of the model's layouts, and read at others. Raises: AssertionError: a rank got other bits."""
    spec, layouts = MODELS[model]
    full = save(tmp_path / "trainer", spec, layouts[number])
    wrong = []
    for target in targets:
        for rank in range(target.world_size):
            got = fill(tmp_path / "trainer", spec, target, rank)
            if found := same(got, expected(spec, target, rank, full)):
                wrong.append((target, rank, found))
    assert wrong == []


def test_a_rank_reads_its_share_only(tmp_path: Path) -> None:
    spec, target = tiny_spec(), Parallel(tensor=4)
    save(tmp_path / "trainer", spec, Parallel(tensor=2))
    layout = megatron_layout(spec, target)
    with ExitStack() as stack:
        shards = SavedShards(tmp_path / "trainer", spec, stack)
        states = SavedStates(shards, spec, layout, 3, unread(spec, target, 3, torch.bfloat16))
        assert states.num_bytes() == layout.elements_of(3) * (2 + 3 * 4)


def test_at_the_same_layout_a_rank_reads_its_own_file(tmp_path: Path) -> None:
    """So that what copies of a tensor should not have in common, e.g. after a bug, survives a resume."""
    save(tmp_path / "trainer", tiny_spec(), Parallel(tensor=2))
    (tmp_path / "trainer" / "shard-tp00-pp00.safetensors").unlink()
    fill(tmp_path / "trainer", tiny_spec(), Parallel(tensor=2), 1)
    with pytest.raises(ConfigError, match=r"shard-tp00-pp00\.safetensors cannot be read"):
        fill(tmp_path / "trainer", tiny_spec(), Parallel(), 0)


NAME = "decoder.layers.3.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (f"exp_avg/{NAME}", None, r"shard-tp01-pp00\.safetensors lacks exp_avg/decoder"),
        (f"main/{NAME}", torch.zeros(16, 11), r"tp01.* has main/.* as F32 \[16, 11\], this run needs F32 \[16, 12\]"),
        (f"main/{NAME}", torch.zeros(16, 12).bfloat16(), r"has main/.* as BF16 \[16, 12\], this run needs F32"),
        (f"step/{NAME}", torch.tensor(8.0), r"step of .*fc2\.weight is 7 in one shard, 8 in another: .* restore"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused_before_anything_changes(
    tmp_path: Path, key: str, value: torch.Tensor | None, says: str
) -> None:
    spec = tiny_spec()
    save(tmp_path / "trainer", spec, Parallel(tensor=2))
    path = tmp_path / "trainer" / "shard-tp01-pp00.safetensors"
    held = load_file(path)
    save_file({k: t for k, t in held.items() if k != key} | ({} if value is None else {key: value}), path)
    tensors, untouched = (unread(spec, Parallel(), 0, torch.bfloat16) for _ in range(2))
    with pytest.raises(ConfigError, match=says):
        read_rank(tmp_path / "trainer", spec, Parallel(), 0, tensors)
    assert same(tensors, untouched) == []


@pytest.mark.parametrize("number", range(len(DENSE)))
def test_parts_of_flat_tensors_are_read_from_every_layout(tmp_path: Path, number: int) -> None:
    """As the distributed optimizer divides: seven ranks, whose parts begin and end within rows."""
    spec, parallel = tiny_spec(), Parallel(tensor=2)
    full = save(tmp_path / "trainer", spec, DENSE[number])
    wanted = expected(spec, parallel, 1, full)
    for part in range(7):
        held: dict[str, Tensor | FlatPart] = dict(unread(spec, parallel, 1, torch.bfloat16))
        for name, tensor in wanted.items():
            if name.partition("/")[0] in MOMENTS:
                start, end = (tensor.numel() * edge // 7 for edge in (part, part + 1))
                values = torch.full((end - start,), torch.nan)
                held[name] = FlatPart(shape=tuple(tensor.shape), start=start, values=values)
        with ExitStack() as stack:
            shards = SavedShards(tmp_path / "trainer", spec, stack)
            SavedStates(shards, spec, megatron_layout(spec, parallel), 1, held).fill()
        for name, each in held.items():
            flat = wanted[name].flatten()
            if isinstance(each, FlatPart):
                flat = flat[each.start : each.start + len(each.values)]
            assert torch.equal(values_of(each).flatten(), flat), name
