"""Experts with the names of a grouped product are trained, saved and read as those with mcore's own names are.

TransformerEngine, whose modules have these names, is not needed: tests/fakes/grouped_experts.py gives them to mcore's.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.kit.models import save_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]
# Where experts have other copies than the rest of the layer: one of each, whose optimizer state is whole there; and one
# on each tensor rank, whose gradients are reduced over ranks that share nothing else.
CHOSEN = ("ep2-zero", "tp2-sequence")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    save_model("qwen3-moe", folder / "model")
    common = {"model": str(folder / "model")}
    cases = [
        common | {"name": f"{layout}-{names}", "trainer": LAYOUTS[layout], "grouped": names == "grouped"}
        for names in ("local", "grouped")
        for layout in CHOSEN
    ]
    (folder / "cases-2.json").write_text(json.dumps(cases))
    launch(2, folder, "tests.integration.trainer.grouped_worker")
    return folder


def report(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / f"rank{rank}.json").read_text())
    return found


@pytest.mark.parametrize("layout", CHOSEN)
def test_the_engine_has_mcore_s_names(folder: Path, layout: str) -> None:
    for rank in range(2):
        local, grouped = (report(folder, f"{layout}-{names}", rank) for names in ("local", "grouped"))
        assert any("experts.linear_fc1.weight" in name for name in grouped["own"])
        assert grouped["names"] == local["names"]


@pytest.mark.parametrize("layout", CHOSEN)
def test_checkpoints_have_the_same_files_and_tensors(folder: Path, layout: str) -> None:
    local, grouped = (folder / f"{layout}-{names}" / "checkpoint" for names in ("local", "grouped"))
    files = sorted(path.name for path in local.glob("*.safetensors"))
    assert sorted(path.name for path in grouped.glob("*.safetensors")) == files
    assert sum(file.startswith("experts-") for file in files) == (2 if layout == "ep2-zero" else 1)
    for file in files:
        expected, got = load_file(local / file), load_file(grouped / file)
        assert sorted(got) == sorted(expected)
        for name, tensor in got.items():
            # not bitwise: the gradient's norm is a sum in the order of the parameters
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-7, msg=lambda t, at=name: f"{at} {t}")


@pytest.mark.parametrize("layout", CHOSEN)
def test_training_continues_from_them(folder: Path, layout: str) -> None:
    local, grouped = (report(folder, f"{layout}-{names}") for names in ("local", "grouped"))
    assert grouped["again"] == grouped["after"] == pytest.approx(local["after"], rel=1e-5, abs=1e-7)
