"""What SGLang makes of our arguments on each generation of GPUs: its settings, and the parameters that a sync writes.

`sglang_settings.json` is what they were when somebody last looked: a new SGLang that decides otherwise fails here by
name. Written anew with TANDEM_WRITE_GOLDEN=1, to be read before it is committed.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.sglang_rank import model_config
from tests.house.repository import REPO
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec

GOLDEN = Path(__file__).with_name("sglang_settings.json")
CASES_S = 900.0
GENERATIONS = {"sm80": [8, 0], "sm90": [9, 0], "sm100": [10, 0]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"moe": False, "tensor": 1, "expert": 1, "dtype": "bfloat16"},
    "dense-tp2": {"moe": False, "tensor": 2, "expert": 1, "dtype": "bfloat16"},
    "dense-float32": {"moe": False, "tensor": 1, "expert": 1, "dtype": "float32"},
    "moe-tp2": {"moe": True, "tensor": 2, "expert": 1, "dtype": "bfloat16"},
    "moe-tp2-ep2": {"moe": True, "tensor": 2, "expert": 2, "dtype": "bfloat16"},
}
REFUSED: dict[str, dict[str, Any]] = {
    # What SGLang chooses by itself on Blackwell: blocks of [up; gate].
    "auto": {"overrides": {"moe_runner_backend": "auto"}},
    # [up; gate] in the shape of [gate; up].
    "flashinfer_cutlass": {"overrides": {"moe_runner_backend": "flashinfer_cutlass"}},
    # Rows of gate and up in turn, in the same shape.
    "interleaved": {"environ": {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "1"}},
}

pytestmark = pytest.mark.timeout(1000)


@functools.cache
def answers(generation: str) -> dict[str, dict[str, Any]]:
    """Of all cases on this generation, by name."""
    cases = MODELS | (
        {name: MODELS["moe-tp2"] | case for name, case in REFUSED.items()} if generation == "sm100" else {}
    )
    asked = [{"capability": GENERATIONS[generation], "overrides": {}} | case for case in cases.values()]
    command = [sys.executable, "-W", "ignore", "-m", "tests.cuda.sglang_rank", json.dumps(asked)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=CASES_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_settings_and_parameters_are_those_that_a_sync_was_made_for(generation: str, model: str) -> None:
    case, found = MODELS[model], answers(generation)[model]
    check_golden(f"{generation} {model}", found["settings"])
    assert found["refused"] is None
    spec = ModelSpec.from_config(model_config(case["moe"]))
    layout = sglang_layout(spec, Parallel(tensor=case["tensor"], expert=case["expert"]))
    shapes = {name: list(shape) for name, shape in layout.parameters_of(case["tensor"] - 1).items()}
    assert {name: shape for name, (shape, _) in found["parameters"].items()} == shapes
    assert {name for name, (_, dtype) in found["parameters"].items() if dtype != case["dtype"]} == set()


def check_golden(key: str, settings: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("TANDEM_WRITE_GOLDEN") == "1":
        golden[key] = settings
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert golden[key] == settings


@pytest.mark.parametrize("case", REFUSED)
def test_a_rank_refuses_kernels_that_keep_experts_in_another_form(case: str) -> None:
    assert "in another form than a weight sync writes" in str(answers("sm100")[case]["refused"])
