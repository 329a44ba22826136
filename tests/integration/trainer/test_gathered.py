"""With trainer.overlap_param_gather, everything that reads parameters after a step finds all of them.

Without the wait at the end of a step, each of two ranks would have its own part of the last update only.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer.gather_worker import EMPTY
from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.kit.models import save_model
from trainer_service.checkpoints.policy import SavedPolicy
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]
RUNS = {"overlapping": LAYOUTS["dp2-overlap"], "waiting": LAYOUTS["dp2-zero"]}


def compute(folder: Path, work: str, runs: Mapping[str, Any], size: int = 2) -> None:
    """Run cases of gather_worker with a number of ranks."""
    cases = [
        {"name": name, "model": str(folder / "model"), "trainer": options, "work": work}
        for name, options in runs.items()
    ]
    (folder / f"cases-{size}.json").write_text(json.dumps(cases))
    launch(size, folder, "tests.integration.trainer.gather_worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathered")
    save_model("qwen3", folder / "model")
    compute(folder, "readers", RUNS)
    return folder


@pytest.fixture(scope="module")
def emptied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, whose parameters are in buckets of their own; `single` has all of them on one rank."""
    folder = tmp_path_factory.mktemp("emptied")
    save_model("qwen3-moe", folder / "model")
    compute(folder, "empty", RUNS | {"undivided": LAYOUTS["dp2"]})
    compute(folder, "empty", {"single": LAYOUTS["tp1"]}, size=1)
    return folder


def reports(folder: Path, run: str = "overlapping", size: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / run / f"rank{rank}.json").read_text()) for rank in range(size)]


def test_ranks_publish_the_same_weights(folder: Path) -> None:
    one, other = reports(folder)
    assert one["published"] == other["published"]
    changed = [name for name, digest in one["published"].items() if digest != one["before"][name]]
    assert sorted(changed) == sorted(one["before"])


def test_a_refreshed_reference_has_all_of_the_policy(folder: Path) -> None:
    for report in reports(folder):
        assert report["reference"] == {f"reference/{name}": each for name, each in report["published"].items()}
    assert reports(folder)[0]["reference"] == reports(folder)[1]["reference"]


def test_exports_and_checkpoints_equal_those_of_a_trainer_that_does_not_overlap(folder: Path) -> None:
    spec = ModelSpec.from_folder(folder / "model")
    exports, saved = [], []
    with ExitStack() as stack:
        for run in RUNS:
            exports.append(load_file(folder / run / "export" / "model.safetensors"))
            saved.append(dict(SavedPolicy(folder / run / "checkpoint", spec, stack)))
    for name, tensor in exports[0].items():
        torch.testing.assert_close(tensor, exports[1][name], rtol=0, atol=1e-6)
        assert torch.equal(saved[0][name], tensor), name
        assert torch.equal(saved[1][name], exports[1][name]), name


@pytest.mark.parametrize("run", RUNS)
def test_ranks_have_the_same_weights_after_updates_without_a_micro_batch(emptied: Path, run: str) -> None:
    """AdamW's momentum moves each rank's parts in such an update too, and nothing of it may stay on one rank."""
    one, other = reports(emptied, run)
    before = None
    for empty in EMPTY:
        assert one[empty]["published"] == other[empty]["published"], empty
        assert one[empty]["published"] != before, empty
        before = one[empty]["published"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("empty", EMPTY)
def test_updates_without_a_micro_batch_are_those_of_one_rank(emptied: Path, run: str, empty: str) -> None:
    assert_near(emptied, run, empty, "single")
    assert_near(emptied, run, empty, "undivided")


def assert_near(folder: Path, run: str, empty: str, expected: str) -> None:
    """Exports and metrics of a step are those of another run, but for rounding."""
    got, theirs = (load_file(folder / name / empty / "model.safetensors") for name in (run, expected))
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5, msg=lambda text, at=name: f"{at} {text}")
    mine, others = (reports(folder, name, size=1)[0][empty]["metrics"] for name in (run, expected))
    assert mine == pytest.approx(others, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_virtual_stages_have_the_same_weights_after_updates_without_a_micro_batch(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "model")
    compute(tmp_path, "empty", {"stages": LAYOUTS["pp2-dp2-overlap"]}, size=4)
    found = reports(tmp_path, "stages", size=4)
    for empty in EMPTY:
        for one, other in ((0, 1), (2, 3)):  # the copies of a stage
            assert found[one][empty]["published"] == found[other][empty]["published"], (one, empty)
    for empty, rank in [(empty, rank) for empty in EMPTY for rank in (0, 2)]:
        assert found[rank][empty]["published"] != found[rank]["none"]["published"] or empty == "none"
