"""The examples with data like GSM8K, MATH and code: checked, and run, with a tiny model that has a chat template."""

import json
import math
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from examples.chat.rewards import tidy
from tests.e2e.conftest import Tandem, rows_of, summary_of
from tests.house.repository import REPO
from tests.kit.folders import write_tokenizer
from tests.kit.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

Start = Callable[..., Tandem]
EXAMPLES = REPO / "examples"
# By example: its rewards' names and weights.
PARTS = {
    "chat": {"math_verify": 1.0, "tidy": 0.2},
    "math": {"math_verify": 1.0, "overlong": 1.0},
    "code": {"passed": 1.0, "format": 0.1},
}
MEASURES = {
    "chat": {"heldout": {"mean@1"}},
    "math": {"easy": {"mean@1"}, "hard": {"mean@8", "pass@2", "pass@8", "maj@8"}},
    "code": {"heldout": {"mean@1"}},
}
WORDS = ["<pad>", "<eos>", "<unk>", "<|user|>", *string.printable]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random weights, a token per character."""
    folder = make_model(tmp_path / "model", vocab_size=len(WORDS), eos_token_id=1, max_position_embeddings=2048)
    write_tokenizer(folder, WORDS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    return folder


@pytest.mark.parametrize("name", PARTS)
def test_the_check_finds_nothing_but_the_missing_model(tandem: Start, model: Path, name: str) -> None:
    check = ("check", "-c", str(EXAMPLES / name / f"{name}.yaml"))
    good = tandem(*check, "--set", f"model.path={model}")
    assert good.wait_end() == 0, good.output()
    assert "warning" not in good.output()
    missing = tandem(*check)
    assert missing.wait_end() == 2, missing.output()
    assert "model.path" in missing.output()


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_an_answer_as_the_rows_have_it_earns_everything(name: str) -> None:
    for line in (EXAMPLES / "chat" / name).read_text(encoding="utf-8").splitlines():
        assert tidy(json.loads(line)["answer"], num_tokens=40) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_it_runs_and_each_reward_has_its_curve(tandem: Start, model: Path, tmp_path: Path, name: str) -> None:
    settings = {"model.path": model, "run.iterations": 2, "grpo.max_new_tokens": 16}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    config = EXAMPLES / name / f"{name}.yaml"
    run = tandem("run", "-c", str(config), *overrides)
    assert run.wait_end(400) == 0, run.output()
    folder = tmp_path / "runs" / name
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        parts = sum(weight * row[f"reward/{part}_mean"] for part, weight in PARTS[name].items())
        assert math.isclose(row["reward_mean"], parts, abs_tol=1e-6)
    for measured, measures in MEASURES[name].items():
        assert {f"eval/{measured}/{measure}" for measure in measures} <= rows[-1].keys()
    assert summary_of(folder)["weight_sync"]["redundancy"] == 1.0
    samples = tandem("samples", str(folder), "--iteration", "2", "--json")
    assert samples.wait_end() == 0, samples.output()
    shown = json.loads(samples.lines[0])
    system_prompt = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["system_prompt"]
    assert shown["prompt"].startswith(f"<|user|>system: {system_prompt}\n<|user|>user: ")
    assert shown["reward_parts"].keys() == PARTS[name].keys()


TALK = """
class Talk:
    \"\"\"A helper is asked between two turns; the second one follows the first as it was sampled.\"\"\"

    async def reset(self, row, seed):
        self.talk = row["messages"]
        return []

    async def step(self, turn):
        if turn.index == 0:
            self.talk = [*self.talk, turn.message]
            return {"conversation": [{"role": "user", "content": "What is 10 + 11?"}], "done": False}
        if turn.index == 1:
            self.talk = [*self.talk, {"role": "user", "content": "What is 20 + 31?"}]
            return {"conversation": self.talk, "reward": float("1" in turn.text), "done": False}
        return [], float("5" in turn.text), True
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_branches_of_an_episode_are_trained_as_they_were_sampled(tandem: Start, tmp_path: Path, kind: str) -> None:
    """By real engines: the trainer's log-probs of each branch are the engine's."""
    (tmp_path / "talk.py").write_text(TALK)
    config = yaml.safe_load((EXAMPLES / "calculator" / "calculator.yaml").read_text(encoding="utf-8"))
    config["run"] |= {"iterations": 3, "evaluate_every": 3}
    config["model"] = {"path": str(EXAMPLES / "calculator" / "model")}
    config["data"] |= {name: str(EXAMPLES / "calculator" / f"{name}.jsonl") for name in ("train", "heldout")}
    config["environment"] = {"function": f"{tmp_path}/talk.py:Talk"}
    config["reward"] = {"kind": "environment"}
    if kind == "async":
        config["schedule"] = {"kind": "async"}
        config["grpo"]["preset"] = "decoupled"
        config["sync"] |= {"install": "staged", "pause": "keep_kv"}
    (tmp_path / "talk.yaml").write_text(yaml.safe_dump(config))
    run = tandem("run", "-c", str(tmp_path / "talk.yaml"))
    assert run.wait_end(400) == 0, run.output()
    folder = tmp_path / "runs" / "calculator"
    rows = rows_of(folder)
    assert len(rows) == 3
    assert all(row["turns_mean"] > 2 for row in rows)
    differences = [row["logprob_abs_diff_max"] for row in rows if row["logprob_abs_diff_max"] is not None]
    assert differences, "async: of samples of the trainer's own version only"
    assert max(differences) <= 1e-4
    ledger = tandem("ledger", str(folder), "--verify")
    assert ledger.wait_end() == 0, ledger.output()
    samples = tandem("samples", str(folder), "--iteration", "3", "--json")
    assert samples.wait_end() == 0, samples.output()
    said = [json.loads(line)["transcript"]["messages"] for line in samples.lines]
    assert any(sum(message.get("branch", False) for message in messages) == 2 for messages in said)
