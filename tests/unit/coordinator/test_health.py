"""Runs that cannot learn, or are destroyed, are told; those that learn are left alone."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from coordinator.record.health import Trouble, judged, logprob_limits
from coordinator.record.progress import Progress
from coordinator.watch.events import EventKind, EventLog
from tandem_files.metrics_file import Heldout
from tandem_files.metrics_table import REWARD_COLLAPSED
from tests.unit.coordinator.test_state import state_at


def troubles(table: Sequence[Mapping[str, float]], heldout: Heldout, limits: Mapping[str, float]) -> list[Trouble]:
    return judged(table, heldout, limits)[1]


STEADY = {
    "entropy": 0.8,
    "kl_old": 1e-3,
    "zero_variance_ratio": 0.3,
    "reward_std": 0.4,
    "truncated_ratio": 0.02,
    "trained_samples": 128,
    "loss": 0.01,
    "grad_norm": 1.0,
    "logprob_abs_diff_max": 1e-6,
}

FLOAT32 = logprob_limits(["float32", "same"], None)
BFLOAT16 = logprob_limits(["bfloat16", "same"], None)


def rows(reward: list[float], **curves: Any) -> list[dict[str, float]]:
    """One row per reward; other curves as numbers or as lists as long."""
    return [
        {"iteration": i + 1, **STEADY, "reward_mean": value}
        | {name: curve[i] if isinstance(curve, list) else curve for name, curve in curves.items()}
        for i, value in enumerate(reward)
    ]


def kinds(table: list[dict[str, float]], start: float | None = None) -> list[str]:
    return [trouble.kind for trouble in troubles(table, Heldout(initial=start, std=0.458), FLOAT32)]


RISING = [0.27 + 0.7 * i / 39 for i in range(40)]


@pytest.mark.parametrize("length", range(41))
def test_a_run_that_learns_is_left_alone_at_every_length(length: int) -> None:
    table = rows(RISING[:length], entropy=[0.9 - 0.022 * i for i in range(length)])
    assert kinds(table, 0.268) == []


def test_a_solved_task_is_no_collapse() -> None:
    assert kinds(rows([*RISING, *[0.99] * 20], entropy=0.01, zero_variance_ratio=0.97), 0.268) == []


SCALES = {"0 or 1": (1, 0), "-1 or 1": (2, -1), "-6 to -5": (1, -6), "0 to 100": (100, 0), "huge": (1e12, -1e12)}
SCALES |= {"tiny": (1e-7, 0), "tiny steps": (1e-3, -8)}


def of_right_answers(shares: list[float], factor: float = 1.0, offset: float = 0.0, **curves: Any) -> Any:
    """One row per share of right answers, each worth `offset + factor`, a wrong one `offset`."""
    spread = [factor * (share * (1 - share)) ** 0.5 for share in shares]
    return rows([offset + factor * share for share in shares], reward_std=spread, **curves)


@pytest.mark.parametrize(("factor", "offset"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize(
    ("shares", "told"),
    [
        (RISING, []),
        ([0.05 + 0.01 * i for i in range(41)], []),  # operator/negative_reward_health.py, at a scale of -1 or 1
        ([*RISING, *[0.97, 0.99] * 20], []),
        ([0.5, 0.47, 0.52, 0.45, 0.55, 0.5, 0.44] * 6, []),
        ([*RISING, *[0.5] * 10], ["reward"]),
        ([*[0.45] * 30, *[0.0] * 10], ["reward"]),
        ([*[0.45] * 3, *[0.0] * 3], ["reward"]),
        ([0.0] * 20, []),
        ([1.0] * 20, []),
    ],
)
def test_neither_sign_nor_scale_of_a_reward_matters(
    shares: list[float], told: list[str], factor: float, offset: float
) -> None:
    assert kinds(of_right_answers(shares, factor, offset)) == told
    fall = judged(of_right_answers(shares, factor, offset), Heldout(), {})[0]["reward"]
    assert (fall > REWARD_COLLAPSED.value) == (told == ["reward"])
    assert fall == pytest.approx(judged(of_right_answers(shares), Heldout(), {})[0]["reward"], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(("factor", "offset"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("left", [0.0, 0.02])
def test_the_loss_of_few_right_answers_is_a_collapse(left: float, factor: float, offset: float) -> None:
    """Of 0.15 to 0 it is 0.42 standard deviations."""
    equal = [0.2] * 30 + [1.0 - 10 * left] * 10
    table = of_right_answers([0.15] * 30 + [left] * 10, factor, offset, zero_variance_ratio=equal)
    assert kinds(table) == (["reward", "equal_rewards"] if left == 0.0 else ["reward"])


@pytest.mark.parametrize("right", [0.15, 0.5, 0.9])
def test_what_sampling_does_to_a_mean_is_no_collapse(right: float) -> None:
    """Batches of 16 prompts whose difficulty differs, at every length of the run; then right answers become rare."""
    generator = random.Random(3)

    def share_of(mean: float) -> float:
        difficulties = [generator.betavariate(2 * mean, 2 * (1 - mean)) for _ in range(16)]
        return sum(generator.random() < each for each in difficulties for _ in range(8)) / 128

    steady = [share_of(right) for _ in range(80)]
    assert max(abs(later - earlier) for earlier, later in pairwise(steady)) > 0.1
    assert [kinds(of_right_answers(steady[:length])) for length in range(4, 81, 4)] == [[]] * 20
    assert kinds(of_right_answers(steady + [share_of(right * 0.13) for _ in range(30)])) == ["reward"]


@pytest.mark.parametrize(("factor", "offset"), SCALES.values(), ids=SCALES)
def test_a_task_is_solved_at_every_scale(factor: float, offset: float) -> None:
    alike = {"entropy": 0.01, "zero_variance_ratio": 0.97}
    assert kinds(of_right_answers([*RISING, *[0.99] * 20], factor, offset, **alike)) == []
    for never in ([0.3] * 40, [*RISING, *[0.2] * 20]):
        assert {"entropy", "equal_rewards"} <= set(kinds(of_right_answers(never, factor, offset, **alike)))


@pytest.mark.parametrize("reward", [0.0, 0.1, -1.0, -5.3, 1e9])
def test_a_constant_reward_teaches_nothing_and_has_not_collapsed(reward: float) -> None:
    """The mean of 128 times 0.1, and their deviation from it, are rounded."""
    table = rows([reward, reward * (1 - 1e-16)] * 10, zero_variance_ratio=1.0, reward_std=abs(reward) * 1e-17)
    (told,) = troubles(table, Heldout(), FLOAT32)
    assert f"got the reward {reward:g}, so the policy does not learn" in told.text
    assert judged(table, Heldout(), {})[0] == {"reward": 0.0}


@pytest.mark.parametrize(("factor", "offset"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize(("share", "told"), [(0.72, []), (0.66, []), (0.633, ["accuracy"]), (0.0, ["accuracy"])])
def test_held_out_scores_below_their_start_at_every_scale(
    share: float, told: list[str], factor: float, offset: float
) -> None:
    table = of_right_answers([0.4, 0.5, 0.6], factor, offset)
    table[1]["heldout_accuracy"] = offset + factor * share
    heldout = Heldout(initial=offset + factor * 0.7, std=factor * 0.458, title="held-out reward")
    found = troubles(table, heldout, FLOAT32)
    assert [trouble.kind for trouble in found] == told
    assert [trouble.text.startswith("Held-out reward is") for trouble in found] == [True for _ in told]


def test_a_pattern_that_never_matches() -> None:
    table = rows([0.0] * 3, zero_variance_ratio=1.0, reward_std=0.0)
    assert [kinds(table[:n]) for n in (0, 1, 2, 3)] == [[], [], ["equal_rewards"], ["equal_rewards"]]
    assert "got the reward 0, so the policy does not learn" in troubles(table, Heldout(), FLOAT32)[0].text


def test_what_is_said_of_truncated_completions_holds_for_every_reward() -> None:
    (told,) = troubles(rows([0.3] * 3, truncated_ratio=0.92), Heldout(), FLOAT32)
    assert told.text.startswith("92% of the completions of the last 2 iterations are cut off by grpo.max_new_tokens")
    assert told.text.endswith("A reward with require_stop gives them 0.")
    assert "raise it, or find out why" in told.text


def test_a_learning_rate_of_ten() -> None:
    table = rows(
        [0.7, 0.01, 0.0],
        entropy=[0.8, 0.001, 0.0],
        kl_old=[9.0, 3.0, 0.0],
        truncated_ratio=[0.0, 1.0, 1.0],
        zero_variance_ratio=[0.3, 0.95, 1.0],
    )
    table[-1]["heldout_accuracy"] = 0.0
    assert kinds(table, 0.717) == ["accuracy", "reward", "truncated", "kl", "entropy", "equal_rewards"]
    assert (
        troubles(table, Heldout(initial=0.717, std=0.45), FLOAT32)[0].text
        == "Held-out accuracy is 0; it was 0.717 before the training."
    )


@pytest.mark.parametrize(("accuracy", "told"), [(0.72, []), (0.66, []), (0.633, ["accuracy"])])
def test_accuracy_below_its_start(accuracy: float, told: list[str]) -> None:
    table = rows([0.4, 0.5, 0.6])
    table[1]["heldout_accuracy"] = accuracy  # the last one measured
    assert kinds(table, 0.7) == told
    assert kinds(table) == []


@pytest.mark.parametrize("prefix", ["", "heldout_"])
@pytest.mark.parametrize(("field", "most"), [("reward_errors", 1.0), ("reward_timeouts", 5.0)])
def test_completions_that_are_not_scored(prefix: str, field: str, most: float) -> None:
    scored = {f"{prefix}scored_completions": 100.0}
    assert kinds(rows([0.4] * 3, **scored, **{prefix + field: most})) == []
    table = rows([0.4] * 3, **scored, **{prefix + field: most + 1})
    assert kinds(table) == [prefix + field]
    told = troubles(table, Heldout(), FLOAT32)[0].text
    over = "held-out evaluation" if prefix else "2 iterations"
    assert told.startswith(f"{most + 1:.1f}% of the completions of the last {over} ")


@pytest.mark.parametrize(("num_rows", "window"), [(3, 2), (20, 6), (60, 10)])
def test_every_mean_over_several_iterations_says_over_how_many(num_rows: int, window: int) -> None:
    """The warning that has the text begins with the number of one iteration."""
    bad = {"kl_old": 0.5, "entropy": 0.0, "zero_variance_ratio": 0.95, "truncated_ratio": 1.0}
    scored = {"scored_completions": 128.0, "reward_errors": [0.0] * (num_rows - 1) + [128.0]}
    table = rows([0.9] * (num_rows - window) + [0.1] * window, **bad, **scored)
    found = {trouble.kind: trouble.text for trouble in troubles(table, Heldout(), FLOAT32)}
    assert sorted(found) == ["entropy", "equal_rewards", "kl", "reward", "reward_errors", "truncated"]
    assert [kind for kind, text in found.items() if f"the last {window} iterations" not in text] == []
    assert found["reward_errors"].startswith(f"{1 / window:.1%} of the completions")


def test_the_last_evaluation_stays_in_sight_until_the_next() -> None:
    table = rows([0.4] * 40)
    table[3] |= {"heldout_scored_completions": 100.0, "heldout_reward_errors": 2.0}
    assert kinds(table) == ["heldout_reward_errors"]
    table[30] |= {"heldout_scored_completions": 100.0, "heldout_reward_errors": 0.0}
    assert kinds(table) == []


def test_numbers_that_are_none() -> None:
    table = rows([0.4, 0.5])
    del table[-1]["loss"]
    assert kinds(table) == ["not_finite"]
    assert kinds([*rows([0.4]), {"iteration": 2.0, "reward_mean": 0.4, "trained_samples": 0.0}]) == []


def test_one_bad_iteration_of_a_long_run_is_no_alarm() -> None:
    bad = {"entropy": 0.0, "kl_old": 0.5, "zero_variance_ratio": 1.0, "truncated_ratio": 1.0, "reward_mean": 0.0}
    assert kinds([*rows([0.5] * 40), {**rows([0.5])[0], **bad}]) == []


def test_a_trouble_is_told_when_it_begins_and_when_it_comes_back() -> None:
    progress = Progress(state=state_at(0), events=EventLog(), limits=FLOAT32)
    for row in rows([0.5] * 4, engine_logprobs_not_finite=[3, 3, 0, 3]):
        progress.state.iteration = int(row["iteration"])
        progress._check_training({**row})
    warnings = [event.message for event in progress.events._events if event.kind is EventKind.WARNING]
    assert [message.partition(":")[0] for message in warnings] == ["iteration 1", "iteration 4"]


def test_tokens_without_a_log_prob_of_the_engine_are_told_while_they_come() -> None:
    (trouble,) = troubles(rows(RISING[:9], engine_logprobs_not_finite=[0] * 8 + [3]), Heldout(), FLOAT32)
    assert (trouble.kind, trouble.name) == ("engine_logprobs", "TandemLogprobMismatch")
    assert "no finite log-prob for 3 tokens" in trouble.text
    assert kinds(rows(RISING[:9], engine_logprobs_not_finite=[3] * 8 + [0])) == []


def differing(mean: float | list[float], p999: float, largest: float, steps: int = 30) -> list[dict[str, float]]:
    differences = {"logprob_abs_diff_mean": mean, "logprob_abs_diff_p999": p999, "logprob_abs_diff_max": largest}
    return rows(RISING[:steps], **differences)


def test_a_healthy_run_in_bfloat16_is_left_alone() -> None:
    """Means of 0.01 to 0.04, and a largest difference of millions of tokens of some nats."""
    assert troubles(differing(0.03, 0.3, 6.0), Heldout(), BFLOAT16) == []
    assert judged(differing(0.025, 0.3, 6.0), Heldout(), BFLOAT16)[0]["mismatch"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("mean", "p999", "limits", "told"),
    [
        (0.06, 0.3, BFLOAT16, "0.06 on average (limit 0.05)"),
        (0.02, 0.7, BFLOAT16, "0.7 for one token in a thousand (limit 0.5)"),
        (0.02, 0.3, logprob_limits(["bfloat16"], 0.25), "0.3 for one token in a thousand (limit 0.25)"),
        (0.02, 0.7, logprob_limits(["float32", "bfloat16"], None), "0.7 for one token in a thousand (limit 0.5)"),
        (1e-6, 1e-5, FLOAT32, "2 for some token (limit 0.0001)"),
        (1e-6, 1e-5, logprob_limits(["float32", "same"], 1.5), "2 for some token (limit 1.5)"),
    ],
)
def test_a_mismatch_is_told_by_the_figures_of_the_type(
    mean: float, p999: float, limits: dict[str, float], told: str
) -> None:
    (found,) = troubles(differing(mean, p999, 2.0), Heldout(), limits)
    assert (found.name, told in found.text) == ("TandemLogprobMismatch", True)
    assert judged(differing(mean, p999, 2.0), Heldout(), limits)[0]["mismatch"] > 1


def test_a_mismatch_that_rises_from_the_first_iterations_on_is_told() -> None:
    """slime with SGLang: a mean of 0.011 to 0.036 in 30 steps, which is within the limit (vime, issue 64)."""
    slow = [0.011 + 0.026 * i / 29 for i in range(30)]
    assert troubles(differing(slow[:20], 0.3, 1.0, 20), Heldout(), BFLOAT16) == []
    table = differing([*slow, *[0.037] * 10], 0.3, 1.0, 40)
    (found,) = troubles(table, Heldout(), BFLOAT16)
    assert (found.kind, found.name) == ("mismatch_rising", "TandemLogprobMismatchRising")
    assert "times as much as in the first ones" in found.text
    assert judged(table, Heldout(), BFLOAT16)[0]["mismatch_rise"] > 3


def test_a_rise_of_rounding_is_none() -> None:
    assert troubles(differing([1e-7] * 10 + [8e-4] * 20, 9e-4, 1e-3), Heldout(), {}) == []


def test_the_first_iterations_are_the_first_that_trained() -> None:
    """With grpo.zero_variance: drop a hard task may have nothing to train on at first."""
    table = differing([0.01] * 10 + [0.04] * 20, 0.3, 1.0)
    for row in table[:3]:
        for field in ("logprob_abs_diff_mean", "logprob_abs_diff_p999", "logprob_abs_diff_max"):
            del row[field]
    assert judged(table, Heldout(), BFLOAT16)[0]["mismatch_rise"] == pytest.approx(4.0)
    assert [trouble.kind for trouble in troubles(table, Heldout(), BFLOAT16)] == ["mismatch_rising"]
    assert "mismatch_rise" not in judged(table[:6], Heldout(), BFLOAT16)[0]


@pytest.mark.parametrize(
    ("start", "last", "told"),
    [(1.0, 0.0, ["accuracy"]), (-1.0, -1.0, []), (0.1, 0.1 + 1e-17, []), (-1.0, 1.0, [])],
)
def test_held_out_scores_that_are_all_alike_are_compared_too(start: float, last: float, told: list[str]) -> None:
    table = rows([0.5] * 3)
    table[-1]["heldout_accuracy"] = last
    assert [trouble.kind for trouble in troubles(table, Heldout(initial=start, std=0.0), FLOAT32)] == told
