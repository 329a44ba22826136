"""The calculator example's committed data, tokenizer and model are what its script makes and its README says."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import get_json_schema

from examples.arithmetic.make_model import IGNORED_LABEL
from examples.calculator.make_model import (
    EOS_ID,
    accuracy,
    build_renderer,
    build_tokenizer,
    demonstrations,
    main,
    train,
)
from examples.calculator.problems import Question, sloppy_messages, split_questions
from examples.calculator.tools import calculate
from tandem_files.chat.renderer import probe
from tests.house.repository import REPO

EXAMPLE = REPO / "examples" / "calculator"
MODEL = EXAMPLE / "model"
MAX_CHECKPOINT_BYTES = 4 * 10**6
QUESTION = Question(numbers=(47, 38, 15), signs=("*", "+"))
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "47*38+15"}}\n</tool_call><|im_end|>'


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.runs("python -m examples.calculator.make_model")
def test_the_data_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    assert main(["data", "--out", str(tmp_path)]) == 0
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_every_answer_is_right_and_no_question_is_twice_in_the_data() -> None:
    found = rows("train.jsonl") + rows("heldout.jsonl")
    for row in found:
        expression = re.fullmatch(r"What is (\d\d(?: [-+*] \d\d){1,2})\?", row["prompt"])
        assert expression is not None
        assert row["answer"] == str(eval(expression[1]))  # noqa: S307 - of digits and signs
    assert len({row["prompt"] for row in found}) == len(found) == 4500


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47*38+15", "1801"),
        ("10-99*99", "-9791"),
        ("(1+2)*3", "9"),
        *((wrong, "error") for wrong in ("", "47*", "2**9", "9/3", "a+1", "True+1", "abs(3)", "1+" * 40 + "1")),
    ],
)
def test_the_tool_calculates_with_integers_only(expression: str, result: str) -> None:
    assert calculate(expression) == result


def test_an_episode_has_few_tokens_all_of_them_known() -> None:
    tokenizer = build_tokenizer().backend_tokenizer
    assert (MODEL / "tokenizer.json").read_text(encoding="utf-8") == tokenizer.to_str(pretty=True)
    encoding = tokenizer.encode(CALL)
    assert len(encoding.ids) == 19
    assert encoding.ids[-1] == EOS_ID == json.loads((MODEL / "config.json").read_text())["eos_token_id"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == CALL
    whole = build_renderer().render([{"role": "user", "content": QUESTION.prompt}])
    assert len(whole) == 28
    assert tokenizer.token_to_id("<unk>") not in whole


def test_the_template_is_as_transformers_renders_it_and_never_changes_what_was_said() -> None:
    renderer = build_renderer()
    messages = sloppy_messages(QUESTION, random.Random(0))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    rendered = tokenizer.apply_chat_template(messages, tools=[get_json_schema(calculate)], tokenize=False)
    assert rendered == renderer.template.render(messages, renderer.tools, add_generation_prompt=False)
    assert renderer.parser == "hermes"
    assert all(follow.append_only for follow in probe(renderer))


def test_only_the_assistants_turns_are_imitated() -> None:
    renderer = build_renderer()
    ids, labels = demonstrations([QUESTION], random.Random(0), renderer)
    (said,) = renderer.codec.decode_all([[id_ for id_ in labels[0].tolist() if id_ != IGNORED_LABEL]])
    assert re.fullmatch(r"<tool_call>\n\{.*\}\n</tool_call><\|im_end\|>\d+<\|im_end\|>", said)
    assert bool(((ids == labels) | (labels == IGNORED_LABEL)).all())


def test_the_model_uses_its_tool_as_badly_as_the_readme_says() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_CHECKPOINT_BYTES
    model, questions = Qwen3ForCausalLM.from_pretrained(MODEL), split_questions()[1]
    greedy = accuracy(model, questions)
    assert 0.2 <= greedy <= 0.3
    assert f"{greedy:.1%}" in (EXAMPLE / "README.md").read_text(encoding="utf-8")
    torch.manual_seed(0)
    assert accuracy(model, [each for each in questions if len(each.signs) == 2], sampled=True) >= 0.08


def test_training_is_deterministic_and_learns() -> None:
    losses: list[list[float]] = [[], []]
    models = [train(3, seed=3, report=lambda _step, loss, _model, run=run: run.append(loss)) for run in losses]  # type: ignore[misc]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
