"""`tandem evaluate` from the command line: a model folder that SGLang loads itself, scored on data files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, Tandem

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

# The demo's accuracy before training, which the README states: 0.268 of 500.
BEFORE_TRAINING = 0.268


@pytest.mark.runs("tandem evaluate")
def test_a_folder_is_evaluated_without_a_run(tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    model, heldout = EXAMPLE.parent / "model", EXAMPLE.parent / "heldout.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(heldout.read_text().splitlines(keepends=True)[:20]))
    sets = [
        f"{{name: all, data: {heldout}}}",
        f"{{name: sampled, data: {few}, samples: 4, temperature: 1.0, top_p: 0.9}}",
    ]
    run = tandem(
        "evaluate",
        *("--model", str(model), "--data", str(heldout)),
        *("--set", f"evaluation.sets=[{', '.join(sets)}]", "--set", "grpo.max_new_tokens=4"),
        *("--set", "rollout.max_total_tokens=16384"),
    )
    assert run.wait_end(240) == 0, run.output()
    run.assert_nothing_left()
    folder = tmp_path / "runs" / "evaluate-model"
    results = json.loads((folder / "evaluation.json").read_text())
    measures = {each["settings"]["name"]: each["measures"] for each in results["sets"]}
    assert measures["all"]["mean@1"]["value"] == pytest.approx(BEFORE_TRAINING, abs=0.004)
    assert set(measures["sampled"]) == {"mean@4", "pass@2", "pass@4", "maj@4"}
    assert results["versions"]["sglang"]
    assert any(line.split()[:3] == ["all", "500", "mean@1"] for line in run.lines), run.output()
    assert not (folder / "checkpoints").exists()


def test_what_is_wrong_is_said_before_anything_starts(tandem: Callable[..., Tandem]) -> None:
    run = tandem("evaluate", "--model", str(EXAMPLE.parent / "model"))
    assert run.wait_end(60) == 2, run.output()
    assert "give a model and data" in run.output()
    run = tandem("evaluate", "--model", str(EXAMPLE.parent / "model"), "--data", "missing.jsonl")
    assert run.wait_end(60) == 2, run.output()
    assert "missing.jsonl" in run.output()
    assert "not started" in run.output()
