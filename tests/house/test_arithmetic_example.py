"""The example's committed data and model are what its script makes and its README says."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from examples.arithmetic.make_model import EOS_ID, build_tokenizer, greedy_accuracy, main, train
from examples.arithmetic.problems import Problem, split_problems
from tests.house.repository import REPO

EXAMPLE = REPO / "examples" / "arithmetic"
MODEL = EXAMPLE / "model"
MAX_CHECKPOINT_BYTES = 8 * 10**6


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.runs("python -m examples.arithmetic.make_model")
def test_the_data_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    assert main(["data", "--out", str(tmp_path)]) == 0
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_train_and_heldout_are_disjoint_and_complete() -> None:
    train_prompts = [row["prompt"] for row in rows("train.jsonl")]
    heldout_prompts = [row["prompt"] for row in rows("heldout.jsonl")]
    assert set(train_prompts).isdisjoint(heldout_prompts)
    assert len(set(train_prompts + heldout_prompts)) == len(train_prompts + heldout_prompts) == 8100


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_every_answer_is_right(name: str) -> None:
    for row in rows(name):
        left, right = re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups()  # type: ignore[union-attr]
        assert row == {"prompt": row["prompt"], "answer": str(int(left) + int(right))}


def test_the_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_CHECKPOINT_BYTES


def test_tokenizers_alone_reads_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode("37+58=95<eos>").ids
    assert len(ids) == 9
    assert ids[-1] == EOS_ID == json.loads((MODEL / "config.json").read_text())["eos_token_id"]
    assert tokenizer.decode(ids) == "37+58=95"
    assert tokenizer.to_str(pretty=True) == build_tokenizer().backend_tokenizer.to_str(pretty=True)


def test_the_model_adds_as_badly_as_the_readme_says() -> None:
    accuracy = greedy_accuracy(Qwen3ForCausalLM.from_pretrained(MODEL), split_problems()[1])
    assert 0.25 <= accuracy <= 0.30
    assert f"{accuracy:.1%}" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


def test_an_imperfect_sum_is_not_counted_as_right() -> None:
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    assert greedy_accuracy(model, [Problem(left=11, right=11)]) == 1.0
    assert greedy_accuracy(model, [Problem(left=59, right=59)]) == 0.0


def test_training_is_deterministic_and_learns() -> None:
    losses: list[list[float]] = [[], []]
    models = [train(5, seed=3, report=lambda _step, loss, _model, run=run: run.append(loss)) for run in losses]  # type: ignore[misc]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
