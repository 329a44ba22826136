"""What stays of an evaluation: columns, sentences, and which policy is the best."""

from array import array
from typing import Any

import numpy as np
import pytest

from coordinator.data.cursor import CursorState
from coordinator.learn.estimates import Estimate
from coordinator.learn.evaluation import EvaluationResult
from coordinator.record.evaluations import Evaluations, evaluation_row, heldout_of, message_of, note_best
from coordinator.record.metrics_row import baseline_row
from coordinator.record.state import RunState
from coordinator.watch.events import EventLog
from tandem_clients.flow import Completion, Generation, Group, GroupScores, Prompt
from tandem_config.schema import EvaluationSection


def evaluated(value: float, name: str = "aime", version: int = 3, **scores: Any) -> EvaluationResult:
    tokens = array("I", [1, 2])
    cut = Completion(token_ids=tokens, logprobs=array("f", [0, 0]), truncated=True, oldest_version=version)
    prompt = Prompt(row=1, token_ids=array("I", [1]), answer="")
    groups = (Group(group_id="eval.aime.row1", prompt=prompt, completions=(cut,)),)
    return EvaluationResult(
        name=name,
        policy_version=version,
        generation=Generation(groups=groups, engine_s=0.0, retried_calls=0),
        scored=GroupScores(rewards_PG=np.array([[value]]), accuracy=value, **scores),
        estimates={"mean@1": Estimate(value=value, low=value - 0.1, high=value + 0.1)},
    )


def state() -> RunState:
    return RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="")


def test_columns_have_the_sets_name() -> None:
    assert evaluation_row([evaluated(0.5, num_errors=1, num_timeouts=2)]) == {
        "eval/aime/mean@1": 0.5,
        "eval/aime/mean@1_low": 0.4,
        "eval/aime/mean@1_high": 0.6,
        "eval/aime/length_mean": 2.0,
        "eval/aime/truncated_ratio": 1.0,
        "eval/aime/failed_scores": 3,
        "eval/aime/policy_version": 3,
    }
    assert evaluation_row([evaluated(float("nan"))])["eval/aime/mean@1"] is None


def test_of_two_evaluations_of_a_set_the_later_one_stands_in_the_row() -> None:
    both = [evaluated(0.5, "heldout", 3), evaluated(0.6, "heldout", 4), evaluated(0.1)]
    assert evaluation_row(both)["eval/heldout/policy_version"] == 4
    scored = heldout_of(both)
    assert scored is not None
    assert scored.accuracy == 0.6
    assert heldout_of([evaluated(0.5)]) is None


def test_an_evaluation_in_a_sentence() -> None:
    assert message_of(evaluated(0.5), "") == "aime: mean@1 0.500 (0.400 to 0.600) at version 3"
    assert message_of(evaluated(0.5, "heldout"), "held-out accuracy") == "held-out accuracy 0.500 at version 3"


def test_a_held_out_set_without_a_score_has_no_accuracy() -> None:
    """An accuracy of 0 would be the best of a reward below zero, and reach its target."""
    run, events = state(), EventLog()
    nothing: Any = None
    notes = Evaluations(
        settings=EvaluationSection(), evaluator=nothing, state=run, events=events, leaving=nothing, warn=nothing
    )
    notes.note([evaluated(float("nan"), "heldout")], 1)
    assert (run.initial_accuracy, run.last_accuracy) == (None, None)
    assert baseline_row(3, evaluated(float("nan"), "heldout").scored)["heldout_accuracy"] is None
    notes.note([evaluated(-5.25, "heldout")], 2)
    assert (run.initial_accuracy, run.last_accuracy, run.best_accuracy) == (-5.25, -5.25, -5.25)
    assert message_of(evaluated(-5.25, "heldout"), "held-out reward") == "held-out reward -5.250 at version 3"


def test_the_best_policy_is_the_first_with_the_highest_value() -> None:
    run, metric = state(), "aime/mean@1"
    improved = [note_best(run, metric, [evaluated(value)], n) for n, value in enumerate((0.5, 0.4, 0.6, 0.6))]
    assert improved == [True, False, True, False]
    assert run.best is not None
    assert (run.best.iteration, run.best.value, run.best.policy_version) == (2, 0.6, 3)


@pytest.mark.parametrize("metric", [None, "heldout/mean@1", "aime/mean@4"])
def test_what_is_not_measured_is_not_the_best(metric: str | None) -> None:
    run = state()
    assert not note_best(run, metric, [evaluated(0.5)], 1)
    assert run.best is None


def test_another_metric_begins_anew() -> None:
    run = state()
    note_best(run, "aime/mean@1", [evaluated(0.9)], 1)
    assert note_best(run, "heldout/mean@1", [evaluated(0.2, "heldout")], 2)
    assert run.best is not None
    assert run.best.metric == "heldout/mean@1"
