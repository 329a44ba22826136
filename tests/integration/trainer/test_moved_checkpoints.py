"""A trainer of another layout reads a checkpoint: all of its state bitwise, and the next steps are the same."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem_config.schema import TrainerSection
from tandem_files.model.safetensors_header import read_header
from tests.integration.trainer.groups import Groups, parametrized
from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.kit.checkpoints import read_rank, unread
from tests.kit.models import save_model
from tests.kit.stores import Tensors, same
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * TIMEOUT_S)]
TOLERANCE = 1e-6
# Each layout adds up squares of gradients in another order.
NORM_TOLERANCE = 1e-5
DAMAGED = re.compile(r"exp_avg/.*decoder\.final_layernorm\.weight")


@dataclass(frozen=True, kw_only=True)
class Move:
    """From the layout that writes to the one that reads."""

    kind: str
    source: str
    target: str
    dtype: str = "float32"

    @property
    def written(self) -> str:
        return f"{self.kind}-{self.source}-{self.dtype}"

    @property
    def name(self) -> str:
        return f"{self.written}-to-{self.target}"


MOVES = [
    Move(kind="qwen3", source="tp2", target="tp2-pp2"),
    Move(kind="qwen2-tied", source="pp2-virtual", target="tp2"),
    Move(kind="qwen3-moe", source="ep2", target="tp1"),
    Move(kind="qwen3", source="dp2-zero", target="tp1"),
]
SLOW = [
    Move(kind="qwen3", source="tp2", target="tp1"),
    Move(kind="qwen3-moe", source="tp1", target="etp2"),
    Move(kind="qwen3", source="dp2-zero", target="tp2", dtype="bfloat16"),
    Move(kind="qwen3", source="tp1", target="tp2-sequence"),
    Move(kind="qwen3", source="tp2-pp2", target="pp2-virtual"),
    Move(kind="qwen3", source="dp2", target="tp1"),
    Move(kind="qwen3", source="tp2", target="pp2", dtype="bfloat16"),
    Move(kind="qwen2-tied", source="tp1", target="tp2-pp2"),
    Move(kind="qwen3-moe", source="ep2", target="tp2-ep2"),
    Move(kind="qwen3", source="tp1", target="dp2-overlap"),
    Move(kind="qwen3", source="tp1", target="cp2-zero", dtype="bfloat16"),
    Move(kind="qwen3-moe", source="ep2-zero", target="tp1"),
    Move(kind="qwen2-tied", source="dp2-overlap", target="pp2-dp2-zero"),
]


def run(cases: list[dict[str, Any]], folder: Path) -> None:
    sizes = [TrainerSection.model_validate(each["layout"]).world_size for each in cases]
    for size in sorted(set(sizes)):
        of_size = [each for each, its_size in zip(cases, sizes, strict=True) if its_size == size]
        (folder / f"cases-{size}.json").write_text(json.dumps(of_size))
        launch(size, folder, "tests.integration.trainer.moving_worker")


def case(folder: Path, name: str, move: Move, layout: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": str(folder / move.kind), "layout": LAYOUTS[layout], "dtype": move.dtype} | more


def spoiled(checkpoint: Path, out: Path) -> Path:
    """A copy with one number of one tensor changed, in the last shard."""
    shutil.copytree(checkpoint, out)
    found = [(path, name, info) for path in out.glob("*.safetensors") for name, info in read_header(path).items()]
    path, _, damaged = max((each for each in found if DAMAGED.fullmatch(each[1])), key=lambda each: each[0])
    content = bytearray(path.read_bytes())
    content[damaged.begin] ^= 1
    path.write_bytes(content)
    return out


class Results:
    """Checkpoints that were written and read: a group of moves, when one of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups = Groups(self._compute, MOVES, SLOW)

    def of(self, move: Move) -> Path:
        """The folder with models, and results by name of what was written and of what was moved."""
        self._groups.need(move)
        return self._folder

    def _compute(self, group: list[Move]) -> None:
        folder = self._folder
        for kind in {move.kind for move in group}:
            if not (folder / kind).exists():
                save_model(kind, folder / kind)
        writes = {move.written: move for move in group if not (folder / move.written).exists()}
        run([case(folder, name, move, move.source, source=None) for name, move in writes.items()], folder)
        moves = []
        for move in group:
            checkpoint = folder / move.written / "checkpoint"
            foreign = spoiled(checkpoint, folder / f"{move.name}-spoiled")
            more = {"source": str(checkpoint), "foreign": str(foreign)}
            moves.append(case(folder, move.name, move, move.target, **more))
        run(moves, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("moves"))


def everything(folder: Path, model: Path, dtype: torch.dtype) -> Tensors:
    """All state of a checkpoint, as a single rank would hold it."""
    spec = ModelSpec.from_folder(model)
    return read_rank(folder, spec, Parallel(), 0, unread(spec, Parallel(), 0, dtype))


every_move = parametrized("move", MOVES, SLOW)


@every_move
def test_all_state_is_moved_bitwise(results: Results, move: Move) -> None:
    folder = results.of(move)
    model, dtype = folder / move.kind, getattr(torch, move.dtype)
    written = everything(folder / move.written / "checkpoint", model, dtype)
    moved = everything(folder / move.name / "checkpoint", model, dtype)
    assert same(moved, written) == []
    assert {float(t) for name, t in written.items() if name.startswith("step/")} == {2.0}
    zero = [name for name, tensor in written.items() if not tensor.any()]
    assert zero == []


@every_move
def test_the_next_steps_equal_the_undisturbed_ones(results: Results, move: Move) -> None:
    """The moved trainer has also refused a damaged checkpoint, after its first step."""
    folder = results.of(move)
    got, expected = (json.loads((folder / n / "report.json").read_text()) for n in (move.name, move.written))
    tolerance, of_norm = (TOLERANCE, NORM_TOLERANCE) if move.dtype == "float32" else (0.1, 0.1)
    for number, (mine, theirs) in enumerate(zip(got["steps"], expected["steps"], strict=True)):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        if move.dtype == "bfloat16":  # its rounding, which layouts differ in, is clipped otherwise from step to step
            of_norm = 0.1 * (1 + number)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=of_norm)
    after = [load_file(folder / name / "after" / "model.safetensors") for name in (move.name, move.written)]
    largest = max(float((after[0][name] - after[1][name]).abs().max()) for name in after[1])
    assert largest <= (TOLERANCE if move.dtype == "float32" else 0.05)


@every_move
def test_a_damaged_checkpoint_is_refused_by_file(results: Results, move: Move) -> None:
    refused = json.loads((results.of(move) / move.name / "report.json").read_text())["refused"]
    assert refused.startswith("DamagedCheckpoint: checkpoint ")
    assert re.search(rf"\.safetensors has other bytes than were written, in {DAMAGED.pattern}: ", refused)
    assert refused.endswith("restore the file from a copy, or choose another checkpoint")
