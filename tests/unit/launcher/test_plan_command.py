"""`tandem plan` as users meet it: the JSON of the contract, the table, and errors that say what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.plan.sizes import rollout_sizes, trainer_sizes
from tandem_config.problems import ConfigErrors
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import PRESETS, preset

CONTRACT = [
    "model",
    "total_bytes",
    "trainer_ranks",
    "rollout_ranks",
    "redundancy",
    "plan_seconds",
    "peak_rss_bytes",
    "messages",
    "max_sender_bytes",
    "max_receiver_bytes",
    "predicted_seconds",
    "bound_by",
    "staging_bytes_per_rank",
]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def as_json(*arguments: str) -> dict[str, Any]:
    code, output = invoke(*arguments, "--json")
    assert code == 0, output
    answer: dict[str, Any] = json.loads(output)
    return answer


def test_json_has_the_keys_of_the_contract_first() -> None:
    figures = as_json("--model", "qwen2.5-1.5b", "--trainer", "tp=2", "--rollout", "tp=2", "--replicas", "3")
    assert list(figures)[: len(CONTRACT)] == CONTRACT
    assert figures["total_bytes"] == 2 * 1_543_714_304  # the published number of parameters, tied
    assert (figures["trainer_ranks"], figures["rollout_ranks"]) == (2, 6)
    assert figures["redundancy"] == 1.0
    assert figures["max_receiver_bytes"] == figures["max_sender_bytes"]
    assert figures["staging_bytes_per_rank"] <= 2 * 256 * 2**20
    assert figures["predicted_seconds"] > figures["max_receiver_bytes"] / 50e9


def test_slower_links_take_longer_and_are_named() -> None:
    sizes = ("--model", "qwen2.5-1.5b", "--trainer", "tp=2", "--rollout", "tp=1")
    assert as_json(*sizes, "--rollout-gbps", "1")["bound_by"] == "rollout link"
    slow_trainer = as_json(*sizes, "--trainer-gbps", "1")
    assert slow_trainer["bound_by"] == "trainer link"
    # 1 Gbit/s is 125 MB/s.
    assert slow_trainer["predicted_seconds"] == pytest.approx(slow_trainer["max_sender_bytes"] / 125e6, rel=0.1)


def test_the_dtype_doubles_the_bytes() -> None:
    narrow, wide = (as_json("--model", "qwen3-8b", "--dtype", dtype) for dtype in ("bfloat16", "float32"))
    assert wide["total_bytes"] == 2 * narrow["total_bytes"]


@pytest.mark.runs("tandem plan")
def test_the_table_says_the_same_in_words() -> None:
    code, output = invoke("--model", "qwen3-8b", "--trainer", "tp=4", "--rollout", "tp=2", "--replicas", "4")
    assert code == 0
    for words in ("8 ranks: 4 replicas of 2", "1.00 (bytes received", "predicted", "bound by"):
        assert words in output


def test_simulation_with_faults() -> None:
    sizes = ("--model", "qwen2.5-1.5b", "--trainer", "tp=2", "--replicas", "4")
    plain = as_json(*sizes, "--simulate")["simulated"]
    slow = as_json(*sizes, "--fault", "slow:1=10")["simulated"]
    dead = as_json(*sizes, "--fault", "kill:3@transfer")["simulated"]
    assert slow["seconds"]["total"] > 2 * plain["seconds"]["total"]
    assert (dead["lost_replicas"], dead["attempts"]) == ([3], 2)
    assert plain["last_commit_s"] < dead["first_commit_s"]
    code, output = invoke(*sizes, "--simulate")
    assert code == 0
    assert "simulated round" in output


@pytest.mark.parametrize("model", list(PRESETS))
def test_every_built_in_model_can_be_planned(model: str) -> None:
    assert as_json("--model", model, "--trainer", "tp=2", "--rollout", "tp=4")["redundancy"] == 1.0


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_trainer_ranks_may_share_kv_heads(model: str) -> None:
    figures = as_json("--model", model, "--trainer", "tp=8", "--rollout", "tp=8")
    assert figures["redundancy"] == 1.0
    assert figures["max_receiver_bytes"] < figures["trainer_egress_bytes"] / 7


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_config_json_or_its_folder(tmp_path: Path, as_folder: bool) -> None:
    scaled = {**PRESETS["llama-3.1-70b"], "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(scaled))
    figures = as_json("--model", str(tmp_path if as_folder else tmp_path / "config.json"))
    assert figures["total_bytes"] == as_json("--model", "llama-3.1-70b")["total_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model qwen3-23b", ["--model = qwen3-23b", "did you mean qwen3-32b?"]),
        ("--model Qwen/Qwen3-8B-Base", ["did you mean qwen3-8b?"]),
        ("--model /no/such/folder", ["neither a file", "built in: qwen2.5-1.5b"]),
        ("--model qwen3-8b --trainer tp=3", ["--trainer = tp=3", "KV heads = 8", "tp that fits: 1, 2, 4, 8"]),
        ("--model qwen2.5-7b --trainer tp=8", ["attention heads = 28", "tp that fits: 1, 2, 4"]),
        ("--model qwen3-8b --trainer tensor=2", ["unknown size 'tensor'", "did you mean tp=?"]),
        ("--model qwen3-8b --trainer tp", ["tp must be a whole number, at least 1"]),
        ("--model qwen3-8b --trainer tp=0,loss=2", ["tp=0", "loss must be 0 or 1"]),
        ("--model qwen3-8b --trainer tp=2,tp=4", ["tp is given twice"]),
        ("--model qwen3-8b --trainer pp=5,embedding=0", ["36 layers do not divide by 5", "pp that fits: 1, 2, 3, 4"]),
        ("--model qwen3-8b --trainer ep=4", ["no experts", "ep that fits: 1"]),
        ("--model qwen3-30b-a3b --trainer tp=4,ep=3", ["experts = 128", "expert parallel size 3", "ep that fits: 1"]),
        ("--model qwen3-8b --rollout tp=5", ["--rollout = tp=5", "tp that fits: 1, 2, 4, 8, 16, 32"]),
        ("--model qwen3-8b --rollout pp=2", ["a rollout has no pp"]),
        ("--model qwen3-8b --fault slow:0=x", ["'x' is neither a number nor a phase", "slow:3=4"]),
        ("--model qwen3-8b --fault kill:4@verify", ["there is no replica 4: they are 0 to 0"]),
        ("--model qwen3-8b --fault stop:0", ["cannot be read"]),
        ("--model qwen3-8b --replicas 2 --fault kill:0@1 --fault kill:1@1", ["one death per round"]),
    ],
)
def test_errors_say_what_to_do(arguments: str, words: list[str]) -> None:
    code, output = invoke(*arguments.split())
    assert code == 2
    assert [word for word in words if word not in output] == []


def test_a_config_that_is_none_is_named(tmp_path: Path) -> None:
    for text, words in (("{", "cannot be read"), ("[]", "holds a list"), ('{"model_type": "gpt2"}', "gpt2")):
        (tmp_path / "config.json").write_text(text)
        code, output = invoke("--model", str(tmp_path))
        assert (code, words in output) == (2, True), output


def test_what_is_left_out_is_chosen_and_said() -> None:
    parallel, notes = trainer_sizes("tp=4,pp=8,ep=16", preset("qwen3-235b-a22b"))
    assert parallel == Parallel(
        tensor=4, pipeline=8, expert=16, data=4, embedding_counts=True, loss_counts=True
    )  # 94 + 2 layers over 8 stages; 16 expert ranks need 4 x 4
    assert notes == [
        "dp=4, the least that has room for the expert ranks",
        "embedding=1,loss=1: 94 layers do not divide by pp=8",
    ]
    assert trainer_sizes("pp=16", preset("deepseek-v3-sized"))[0].first_stage_layers == 2
    assert trainer_sizes("pp=2,first=3,last=33", preset("qwen3-8b")) == (
        Parallel(pipeline=2, first_stage_layers=3, last_stage_layers=33),
        [],
    )
    assert rollout_sizes("tp=4,ep=2") == Parallel(tensor=4, expert=2)
    with pytest.raises(ConfigErrors, match="tp is given twice"):
        rollout_sizes("tp=4,tp=2")


def test_planning_imports_no_torch() -> None:
    program = """
import sys
from typer.testing import CliRunner
from launcher.cli import app
assert CliRunner().invoke(app, ["plan", "--model", "qwen3-8b", "--simulate"]).exit_code == 0
assert not {"torch", "transformers", "sglang", "megatron", "matplotlib"} & set(sys.modules), "an engine was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
