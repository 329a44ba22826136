"""`tandem plan` with absurd input: refused by name or planned, with no traceback, no nonsense and an end."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from launcher.cli import app
from launcher.plan.sizes import TRAINER_KEYS

SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# A refusal takes milliseconds, also on a busy machine; a plan of the small model less than a second.
SOON_S = 30.0


def plan(*arguments: str) -> tuple[int, str]:
    """Exit code and output; an exception that is no exit is raised."""
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=200, catch_exceptions=False)
    return result.exit_code, result.output


def config(folder: Path, **entries: Any) -> str:
    (folder / "config.json").write_text(json.dumps(SIZES | entries))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--bucket-mib inf", ["--bucket-mib = inf", "from 0.00390625 to 65536"]),
        ("--bucket-mib nan", ["--bucket-mib = nan"]),
        ("--bucket-mib 1e300", ["--bucket-mib = 1e+300"]),
        ("--bucket-mib 0.001", ["--bucket-mib = 0.001"]),
        ("--bucket-mib 0.004", ["--bucket-mib = 0.004", "messages", "at least 1 MiB"]),
        ("--latency-us inf", ["--latency-us = inf"]),
        ("--latency-us 1e300", ["--latency-us = 1e+294"]),
        ("--rpc-ms inf", ["--rpc-ms = inf"]),
        ("--trainer-gbps inf --digest-gbps inf", ["--trainer-gbps = inf", "--digest-gbps = inf"]),
        ("--trainer tp=8,dp=100000000", ["dp=100000000", "at most 7 digits"]),
        ("--trainer tp=8,dp=1000000", ["--trainer = tp=8,dp=1000000", "8,000,000 ranks"]),
        ("--trainer tp=8,dp=20000", ["--trainer = tp=8,dp=20000", "slices of parameters", "at most 12,000,000"]),
        ("--trainer ep=9999999,etp=9999999", ["--trainer = ep=9999999,etp=9999999", "ranks"]),
        ("--trainer pp=9999999,first=18,last=18", ["9,999,999 ranks"]),
        ("--trainer vpp=9999999", ["9,999,999 pipeline chunks"]),
        ("--rollout tp=1048576", ["--rollout = tp=1048576", "slices"]),
        (f"--trainer tp={'9' * 5000}", ["tp must be a whole number"]),
        (f"--fault slow:{'9' * 5000}=4", ["cannot be read"]),
        ("--fault slow:0=1e308", ["1e308 must be above 0, and at most 1e+06"]),
        ("--replicas 50000 --simulate", ["--replicas = 50000", "hops", "a larger --bucket-mib"]),
        (f"--model {'a' * 5000}", ["neither a file"]),
    ],
)
def test_what_is_too_much_or_no_number_is_named(arguments: str, words: list[str]) -> None:
    begin = time.monotonic()
    model = [] if "--model" in arguments else ["--model", "qwen3-8b"]
    code, output = plan(*model, *arguments.split())
    assert code == 2
    assert [word for word in words if word not in output] == []
    assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"hidden_size": 1e400}, "hidden_size is inf"),
        ({"hidden_size": 64.7}, "hidden_size is 64.7"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 2**16, "num_hidden_layers": 2**14}, "slices of parameters"),
        ({"hidden_size": 2**30, "intermediate_size": 2**30, "num_hidden_layers": 2**14}, "parameters; `tandem plan`"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
    ],
)
def test_a_config_json_without_sense_is_named(entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    code, output = plan("--model", config(tmp_path, **entries))
    assert (code, words in output) == (2, True), output
    assert time.monotonic() - begin < SOON_S


def test_a_file_of_weights_is_not_read_as_a_config(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**40)
    code, output = plan("--model", str(tmp_path / "model.safetensors"))
    assert (code, "it is no config.json" in output) == (2, True), output


NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "4",
    "8",
    "64",
    "1000",
    "99999",
    "9999999",
    "1e9",
    "nan",
    "inf",
    "",
    "x",
    "٣",
    "2²",
]
number = st.sampled_from(NUMBERS)
sizes = st.lists(st.tuples(st.sampled_from([*TRAINER_KEYS, "x"]), number), max_size=3).map(
    lambda items: ",".join(f"{key}={value}" for key, value in items)
)
options = st.fixed_dictionaries(
    {},
    optional={
        "--trainer": sizes,
        "--rollout": sizes,
        "--replicas": number,
        "--bucket-mib": number | st.sampled_from(["0.001", "0.004", "1e-9", "1e300"]),
        "--latency-us": number,
        "--rollout-gbps": number,
        "--copy-gbps": number,
        "--fault": st.tuples(
            st.sampled_from(["slow:0=", "kill:0@", "slow:", "kill:1@transfer"]), number | st.just("commit")
        ).map("".join),
    },
)
entries = st.dictionaries(
    st.sampled_from([*sorted(set(SIZES) - {"model_type"}), "head_dim", "mlp_only_layers", "decoder_sparse_step"]),
    st.integers(-1, 200) | st.sampled_from([10**6, 10**9, 2**63, 64.5, None, "4", [1], [2**40], True]),
    max_size=2,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=options, entries=entries)
def test_any_input_ends_with_a_plan_or_a_refusal(
    options: dict[str, str], entries: dict[str, Any], tmp_path: Path
) -> None:
    begin = time.monotonic()
    arguments = [text for option in options.items() for text in option]
    code, output = plan("--model", config(tmp_path, **entries), "--json", *arguments)
    assert time.monotonic() - begin < SOON_S
    assert code in (0, 2), output
    if code == 0:
        figures = json.loads(output)
        assert figures["redundancy"] == 1.0
        assert all(math.isfinite(value) for value in figures["predicted_terms_s"].values())
        assert 0 < figures["predicted_seconds"] < math.inf
        assert figures["total_bytes"] > 0
