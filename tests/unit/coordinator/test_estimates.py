"""Measures of evaluations against brute force, and their intervals against their own definition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.learn.estimates import estimates, majority_score, mean_with_interval, pass_at_k
from coordinator.workers.answer_extraction import answer_in

SCORES = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7)


@given(SCORES, st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    draws = list(itertools.combinations(scores, k))
    brute = sum(max(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(scores), int(sum(scores)), k) == pytest.approx(brute)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over the outcomes of n completions, each right with chance p, is 1 - (1 - p)^k: that of one among k."""
    n, k, p = 6, 3, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("num", "right", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_an_impossible_pass_at_k_is_refused(num: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="right ones among 2"):
        pass_at_k(num, right, k)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8))
def test_the_majority_does_not_depend_on_the_order(samples: list[tuple[str, float]]) -> None:
    answers, scores = zip(*samples, strict=True)
    most = max(answers.count(answer) for answer in answers)
    means = [
        np.mean([score for other, score in samples if other == answer])
        for answer in sorted(set(answers))
        if answers.count(answer) == most
    ]
    assert majority_score(scores, answers) == pytest.approx(np.mean(means))
    assert majority_score(scores[::-1], answers[::-1]) == pytest.approx(majority_score(scores, answers))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=30))
def test_an_interval_holds_its_value_and_is_repeated(values: list[float]) -> None:
    found = mean_with_interval(np.array(values))
    assert found.low <= found.value + 1e-9
    assert found.high >= found.value - 1e-9
    assert mean_with_interval(np.array(values)) == found


def test_wilson_intervals_are_those_of_the_textbook() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    some, none = mean_with_interval(np.repeat([1.0, 0.0], [81, 182])), mean_with_interval(np.zeros(20))
    assert (round(some.low, 4), round(some.high, 4)) == (0.2553, 0.3662)
    assert (round(none.low, 4), round(none.high, 4)) == (0.0, 0.1611)


def test_bootstrap_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    found = [mean_with_interval(rng.beta(2, 3, size=60)) for _ in range(300)]
    assert 0.9 <= sum(each.low <= 0.4 <= each.high for each in found) / 300 <= 0.99


def test_a_large_set_is_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).random(400)
    monkeypatch.setattr("coordinator.learn.estimates._CHUNK", 1000)
    found = mean_with_interval(values)
    assert 0 < found.high - found.low < 0.1


def test_measures_of_a_set() -> None:
    nan = math.nan
    scores = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, nan, nan, nan]])
    answers = [["7", "7", "7", "8"], list("abcd"), ["1", "2", "2", "2"]]
    found = estimates(["mean@4", "pass@2", "pass@4", "maj@4"], scores, answers, right_from=1.0)
    values = {name: round(each.value, 4) for name, each in found.items()}
    # The third prompt has one score: too few for pass@2 and pass@4.
    assert values == {"mean@4": 0.5, "pass@2": 0.4167, "pass@4": 0.5, "maj@4": 0.5556}
    assert estimates(["pass@4"], scores, answers, right_from=0.0)["pass@4"].value == 1.0
    assert math.isnan(estimates(["mean@1"], np.array([[nan]]), [["x"]], 1.0)["mean@1"].value)
    with pytest.raises(ValueError, match="unknown measure 'median'"):
        estimates(["median@1"], np.zeros((1, 1)), [["x"]], 1.0)


@pytest.mark.parametrize("copies", [1, 2, 32])
@pytest.mark.parametrize("values", [[1.0] * 15 + [0.0] * 15, [0.0] * 30, [0.25, 0.5, 1.0] * 10])
def test_copies_of_a_prompt_are_one_draw_of_an_interval(values: list[float], copies: int) -> None:
    scores = np.repeat(np.array(values), copies)[:, None]
    prompts = np.repeat(np.arange(len(values)), copies).tolist()
    answers = [["x"]] * len(scores)
    once = estimates(["mean@1"], np.array(values)[:, None], [["x"]] * len(values), 1.0)["mean@1"]
    found = estimates(["mean@1"], scores, answers, 1.0, prompts)["mean@1"]
    assert (found.value, found.low, found.high) == pytest.approx((once.value, once.low, once.high), abs=1e-12)


def test_prompts_with_more_copies_count_more_and_their_interval_is_wider() -> None:
    scores = np.array([1.0] * 50 + [0.0, 1.0] * 25)[:, None]
    answers = [["x"]] * 100
    prompts = [0] * 50 + list(range(1, 51))
    apart = estimates(["mean@1", "pass@1"], scores, answers, 1.0)
    found = estimates(["mean@1", "pass@1"], scores, answers, 1.0, prompts)
    assert found["mean@1"].value == apart["mean@1"].value == found["pass@1"].value == 0.75
    assert found["mean@1"].high - found["mean@1"].low > 2 * (apart["mean@1"].high - apart["mean@1"].low)


def test_all_right_copies_have_the_interval_of_their_prompts() -> None:
    found = mean_with_interval(np.ones(12), np.array([0] * 10 + [1, 2]))
    assert found == mean_with_interval(np.ones(3))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{1}$, no, $\boxed{ 2 }$", "2"),
        (r"\fbox{\text{No}}", r"\text{no}"),
        (r"\boxed{\frac{1}{2", r"\frac{1}{2"),
        ("7 #### 8 #### 9", "9"),
        (" Yes. ", "yes"),
        ("", ""),
    ],
)
def test_answers_in_texts(text: str, answer: str) -> None:
    assert answer_in(text) == answer
