"""With trainer.overlap_param_gather, everything that reads parameters after a step finds all of them.

Without the wait at the end of a step, each of two ranks would have its own part of the last update only.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.kit.models import save_model
from trainer_service.saved.policy import SavedPolicy
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]
RUNS = {"overlapping": LAYOUTS["dp2-overlap"], "waiting": LAYOUTS["dp2-zero"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathered")
    save_model("qwen3", folder / "model")
    cases = [{"name": name, "model": str(folder / "model"), "trainer": options} for name, options in RUNS.items()]
    (folder / "cases-2.json").write_text(json.dumps(cases))
    launch(2, folder, "tests.integration.trainer.gather_worker")
    return folder


def reports(folder: Path, run: str = "overlapping") -> list[dict[str, Any]]:
    return [json.loads((folder / run / f"rank{rank}.json").read_text()) for rank in range(2)]


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
