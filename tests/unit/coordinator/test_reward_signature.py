"""How a user's function is called: by the names of its parameters."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.rewards.function import VALUES
from coordinator.workers.own_code import BadScore, number, score_of, scores_of
from coordinator.workers.signature import PLURALS, Unfit, read_signature, unfilled

ROW = {"level": 3, "answer": "from the row"}
SAMPLE = {
    "prompt": "p",
    "completion": "c",
    "answer": "a",
    "columns": ROW,
    "num_tokens": 5,
    "truncated": False,
    "finish_reason": "stop",
    "sample_id": "i1.g0.row1#0",
    "prompt_ids": [3],
    "completion_ids": [4, 1],
    "iteration": 1,
}
BY_NAME_ONLY = ("prompt_ids", "completion_ids", "iteration")


def keywords_only(*, completion: str, level: int, depth: int = 1) -> float:
    raise NotImplementedError


def anything(completion: str, **kwargs: Any) -> float:
    raise NotImplementedError


def arguments(function: Callable[..., Any], args: dict[str, Any] | None = None) -> dict[str, Any]:
    return read_signature(function, per=None, args=args or {}).arguments(SAMPLE)


def test_parameters_are_filled_by_name() -> None:
    assert arguments(lambda completion, answer: 0) == {"completion": "c", "answer": "a"}
    assert arguments(keywords_only) == {"completion": "c", "level": 3}
    assert arguments(lambda sample_id, num_tokens, truncated, finish_reason, prompt, columns: 0) == {
        name: SAMPLE[name] for name in SAMPLE if name not in ("completion", "answer", *BY_NAME_ONLY)
    }
    assert arguments(lambda prompt_ids, completion_ids: 0) == {"prompt_ids": [3], "completion_ids": [4, 1]}


def test_what_is_the_samples_own_goes_before_args_and_these_before_columns() -> None:
    found = arguments(lambda answer, level, depth: 0, {"level": "from args", "depth": 2})
    assert found == {"answer": "a", "level": "from args", "depth": 2}


def test_a_default_stands_for_a_column_that_is_missing() -> None:
    assert arguments(lambda completion, hint=None: 0) == {"completion": "c"}
    with pytest.raises(KeyError, match="the row has no column 'hint'"):
        arguments(lambda completion, hint: 0)


def test_keyword_arguments_get_everything() -> None:
    sample = {name: value for name, value in SAMPLE.items() if name not in BY_NAME_ONLY}
    assert arguments(anything, {"depth": 2}) == {**sample, "level": 3, "depth": 2}


def test_lists_for_a_batch_and_for_a_group() -> None:
    other = {**SAMPLE, "completion": "d", "columns": {"hint": "h"}}
    for per, function in ((None, lambda completions, level, hint: 0), ("group", lambda completions, level, hint: 0)):
        signature = read_signature(function, per=per, args={})
        assert signature.per == (per or "batch")
        assert signature.arguments_of_all([SAMPLE, other]) == {
            "completions": ["c", "d"],
            "level": [3, None],
            "hint": [None, "h"],
        }
    signature = read_signature(lambda num_tokens: 0, per="batch", args={})
    assert signature.arguments_of_all([SAMPLE, other]) == {"num_tokens": [5, 5]}
    with pytest.raises(KeyError, match="the row has no column 'level'"):
        read_signature(lambda completions, level: 0, per=None, args={}).arguments_of_all([other])


def positional(completion: str, /) -> float:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "per", "args", "message"),
    [
        (lambda completions, prompt: 0, None, {}, "'completions', lists .* and 'prompt', .* write 'prompts'"),
        (lambda prompts, completion: 0, None, {}, "for one sample 'prompt' .* batch prompts, c"),
        (lambda completion: 0, "batch", {}, "takes 'completion', which it cannot with per: batch: .* 'completions'"),
        (lambda completions: 0, "sample", {}, "takes 'completions', .* per: sample: call it 'completion'"),
        (lambda completion, depth: 0, None, {"dept": 1}, r"args.dept: it takes no such .* did you mean 'depth'\?"),
        (lambda completion: 0, None, {"completion": 1}, "args.completion: this name is the sample's own"),
        (positional, None, {}, "remove the '/'"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(
    function: Callable[..., Any], per: str | None, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unfit, match=message):
        read_signature(function, per=per, args=args)


def test_all_parameters_that_nothing_fills_are_named_with_what_could() -> None:
    def other(environments, response, label, level, hint=None): ...  # type: ignore[no-untyped-def]

    required = read_signature(other, per=None, args={}).required
    assert unfilled(required, ["level"], "sample").startswith(
        "takes 'environments', 'response', 'label', which nothing fills ('environments' is a name of other "
        "trainers, without a value here: leave it out; 'response' is called 'completion' here; 'label' is "
        "called 'answer' here). Names that can be used: prompt, completion, answer, columns,"
    )
    assert "'response' is called 'completions' here" in unfilled(["response"], [], "batch")
    assert "did you mean 'question'?" in unfilled(["questoin"], ["question"], "batch")
    assert unfilled(["xyzzy"], [], "sample").startswith("takes 'xyzzy', which nothing fills. Names")
    assert unfilled(["question", "data_source"], ["question", "data_source"], "sample") == ""


def test_every_name_has_a_value() -> None:
    assert list(VALUES) == list(PLURALS)


class Scalar:
    """As NumPy's and torch's: of no dimension, with `item()`."""

    shape = ()

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize("value", [True, 1, 1.0, Scalar(1), Scalar(True)])
def test_scores_of_all_kinds_are_scores(value: Any) -> None:
    assert number(value) == 1.0
    assert scores_of((value, 0), 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "returned a str"),
        ({"scores": 1, 2: 0}, r"returned a dict without 'score' \('scores', 2\)"),
        ({"score": "1"}, "returned a str, not a number"),
        (float("nan"), "returned nan, which is not finite"),
        (Scalar(float("-inf")), "returned -inf"),
        ([1.0], "returned a list"),
    ],
)
def test_what_is_no_score_is_named(value: Any, message: str) -> None:
    with pytest.raises(BadScore, match=message):
        score_of(value)
    with pytest.raises(BadScore, match=message if value != [1.0] else "returned a list, not a number"):
        scores_of([0, value], 2)


def test_a_dict_has_a_score_and_parts_that_are_numbers() -> None:
    value = {"score": Scalar(1.0), "format": True, "tone": 0.5, "pred": "7", "why": None, "tokens": [1]}
    assert score_of(value) == (1.0, {"format": 1.0, "tone": 0.5})
    assert scores_of([value, 2], 2) == [(1.0, {"format": 1.0, "tone": 0.5}), 2.0]


def test_none_is_no_score_and_no_error() -> None:
    assert score_of(None) is None
    assert score_of({"score": None, "tone": 0.5}) == (None, {"tone": 0.5})
    assert scores_of([1, None, {"score": None}], 3) == [1.0, None, (None, {})]
    with pytest.raises(BadScore, match="it returned None, not a list of 2 numbers"):
        scores_of(None, 2)


@pytest.mark.parametrize("part", [float("nan"), float("inf"), Scalar(float("-inf")), 10**400])
def test_a_part_that_is_not_finite_leaves_the_score_alone(part: Any) -> None:
    score = score_of({"score": 1, "tone": part, 2: 1, "acc/strict": True, "text": Scalar("x")})
    assert isinstance(score, tuple)
    assert score[0] == 1.0
    assert list(score[1]) == ["tone", "2", "acc/strict"]


VERLS_ROW = {
    "data_source": "own/sums",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}},
    "extra_info": {"index": 0},
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...  # type: ignore[no-untyped-def]


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (VERLS_ROW, {"data_source": "own/sums", "ground_truth": {"target": ["a"]}, "extra_info": {"index": 0}}),
        ({}, {"data_source": None, "ground_truth": "a"}),
        ({"ground_truth": 5, "reward_model": "r"}, {"data_source": None, "ground_truth": 5}),
    ],
)
def test_verls_names_are_filled_from_the_row_and_the_sample(row: dict[str, Any], found: dict[str, Any]) -> None:
    signature = read_signature(compute_score, per=None, args={})
    got = signature.arguments({**SAMPLE, "columns": row})
    assert signature.per == "sample"
    assert {name: got[name] for name in ("data_source", "ground_truth", "extra_info") if name in got} == found
    assert got["solution_str"] == "c"
    needed = read_signature(lambda solution_str, extra_info: 0, per=None, args={})
    assert needed.arguments({**SAMPLE, "columns": {}}) == {"solution_str": "c", "extra_info": {}}


def test_verls_batches_get_lists_and_args_stand_for_what_no_row_has() -> None:
    signature = read_signature(compute_scores, per=None, args={})
    assert signature.per == "batch"
    assert signature.arguments_of_all([{**SAMPLE, "columns": VERLS_ROW}, {**SAMPLE, "columns": {}}]) == {
        "data_sources": ["own/sums", None],
        "solution_strs": ["c", "c"],
        "ground_truths": [{"target": ["a"]}, "a"],
        "extra_infos": [{"index": 0}, {}],
    }
    given = read_signature(compute_score, per=None, args={"data_source": "gsm8k"}).arguments(SAMPLE)
    assert given["data_source"] == "gsm8k"


def test_trls_answer_is_the_column_of_that_name_else_the_answers() -> None:
    signature = read_signature(lambda prompts, completions, answer, **kwargs: 0, per=None, args={})
    own = {**SAMPLE, "columns": {"solution": "56", "level": 2}}
    got = signature.arguments_of_all([SAMPLE, own])
    assert (signature.per, got["answer"]) == ("batch", ["from the row", "a"])
    assert signature.arguments_of_all([own])["answer"] == ["a"]
    assert got["trainer_state"].global_step == 1
    assert callable(got["log_extra"])
    assert callable(got["log_metric"])
    grouped = read_signature(lambda completions, answer, ground_truth: 0, per="group", args={})
    assert grouped.arguments_of_all([own]) == {"completions": ["c"], "answer": ["a"], "ground_truth": ["a"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [([1.0], "returned 1 scores for 2 completions"), (1.0, "a float, not a list of 2 numbers"), ("ab", "a str, not")],
)
def test_a_wrong_number_of_scores_is_named(values: Any, message: str) -> None:
    with pytest.raises(BadScore, match=message):
        scores_of(values, 2)
