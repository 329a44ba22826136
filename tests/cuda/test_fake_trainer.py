"""A trainer rank's step, log-probs, checkpoint and staging on CUDA tensors that are not there: all on its own GPU.

What is not covered: trainer_rank.py.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.test_fake_sync import CONFIG as MIXTURE
from tests.cuda.trainer_rank import DEVICE
from tests.house.repository import REPO
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec

CASES_S = 1500.0
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1001,  # padded under tensor parallelism
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
TP2_DP2 = {"tensor_parallel": 2, "data_parallel": 2, "sequence_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "tp2-dp2-bfloat16": {"config": DENSE, "trainer": TP2_DP2, "rank": 3, "dtype": "bfloat16"},
    "tp2-dp2-tied": {
        "config": DENSE | {"tie_word_embeddings": True},
        "trainer": TP2_DP2,
        "rank": 0,
        "dtype": "bfloat16",
    },
    "mixture-ep2": {"config": MIXTURE, "trainer": TP2_DP2 | {"expert_parallel": 2}, "rank": 2, "dtype": "bfloat16"},
    "pp2-first": {
        "config": DENSE,
        "trainer": {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
        "rank": 0,
        "dtype": "bfloat16",
    },
    "pp2-last-dp2": {
        "config": DENSE,
        "trainer": {"tensor_parallel": 1, "pipeline_parallel": 2, "data_parallel": 2},
        "rank": 3,
        "dtype": "float32",
    },
    "cp2-tp2": {
        "config": DENSE,
        "trainer": {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True},
        "rank": 3,
        "dtype": "bfloat16",
    },
    "dp2-shared": {
        "config": DENSE,
        "trainer": {"tensor_parallel": 1, "data_parallel": 2, "share_prompts": True},
        "rank": 1,
        "dtype": "bfloat16",
    },
    "cp2-tp2-shared": {
        "config": DENSE,
        "trainer": {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True, "share_prompts": True},
        "rank": 1,
        "dtype": "bfloat16",
    },
    "tp4-float32": {"config": DENSE, "trainer": {"tensor_parallel": 4}, "rank": 3, "dtype": "float32"},
}
MISTAKES = ("cpu", "cuda:5", "no device set", "gradient", "a number")
# Where megatron-core itself waits within a micro-batch: for the tokens of each expert, and a stage for shapes.
ITS_WAITS: dict[str, tuple[str, ...]] = {"mixture-ep2": ("moe/",), "pp2": ("pipeline_parallel/p2p_communication.py",)}

pytestmark = pytest.mark.timeout(1600)


@functools.cache
def answers() -> dict[str, dict[str, Any]]:
    """Of all cases, by name."""
    cases = MODELS | {name: MODELS["tp2-dp2-bfloat16"] | {"plant": name} for name in MISTAKES}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cuda.trainer_rank", json.dumps(list(cases.values()))]
    with tempfile.TemporaryDirectory() as folder:
        ahead = Path(folder) / "ahead.so"
        source = REPO / "tests" / "cuda" / "autograd_without_driver.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", ahead, source], check=True, timeout=60)
        environment = os.environ | {"LD_PRELOAD": str(ahead)}
        done = subprocess.run(
            command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=CASES_S, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", MODELS)
def test_a_step_log_probs_and_staging_stay_on_the_device_of_the_rank(case: str) -> None:
    answer, asked = answers()[case], MODELS[case]
    assert answer["error"] is None
    assert answer["mixes"] == []
    assert set(answer["devices"]) == {"cpu", str(DEVICE)}
    assert answer["devices"][str(DEVICE)] > 1000
    assert answer["waited"] == [str(DEVICE)]
    # one kernel, whose step counts are on its device; else the step takes a copy of all parameters
    assert answer["adamw"] == [True, [str(DEVICE)]]
    assert answer["stepped"] == ["aten._fused_adamw_.default"]
    sizes = asked["trainer"]
    layout = megatron_layout(
        ModelSpec.from_config(asked["config"]),
        Parallel(
            tensor=sizes["tensor_parallel"],
            data=sizes.get("data_parallel", 1),
            pipeline=sizes.get("pipeline_parallel", 1),
            context=sizes.get("context_parallel", 1),
            expert=sizes.get("expert_parallel", 1),
        ),
    )
    expected = {name: [list(shape), str(DEVICE)] for name, shape in layout.parameters_of(asked["rank"]).items()}
    assert answer["parameters"] == expected
    assert answer["staged"] == expected
    # where mcore gathers each gradient and the optimizer takes it
    assert answer["gradients"] == sorted(expected)
    if asked["rank"] == 0:
        assert answer["saved"] == ["digests.json", "meta.json", "shard-tp00-pp00.safetensors"]
    assert answer["devices"][str(DEVICE)] > 2000


@pytest.mark.parametrize("case", MODELS)
def test_the_host_waits_for_nothing_while_micro_batches_run(case: str) -> None:
    """Else launching never runs ahead of a GPU."""
    allowed = tuple(place for name, places in ITS_WAITS.items() if case.startswith(name) for place in places)
    waits = [each for each in answers()[case]["host_waits"] if not any(place in each[1] for place in allowed)]
    assert waits == []


def test_a_wait_for_a_copied_number_is_caught() -> None:
    assert any("_to_copy" in name for name, _ in answers()["a number"]["host_waits"])


def test_a_gpu_makes_logits_in_float32() -> None:
    assert "aten.mm.dtype" in answers()["tp2-dp2-bfloat16"]["operations"]


@pytest.mark.parametrize("device", ["cpu", "cuda:5"])
def test_a_tensor_on_another_device_is_caught_where_the_loss_takes_it(device: str) -> None:
    """The same step, its advantages left on another device."""
    answer = answers()[device]
    found = [(where, sorted(devices)) for _, devices, where, _ in answer["mixes"]]
    assert any("token_loss.py" in where and device in devices for where, devices in found)


def test_a_gradient_on_another_device_is_caught() -> None:
    """The same step, whose loss gives autograd a gradient of another device."""
    answer = answers()["gradient"]
    assert answer["error"] is not None
    assert "cuda:5" in answer["error"]


def test_a_thread_without_a_device_is_caught() -> None:
    """The same step in a thread that has not called set_device: what megatron-core makes is on the first GPU."""
    answer = answers()["no device set"]
    assert "cuda:0" in answer["devices"]
    assert answer["error"] is not None or answer["mixes"] != []
