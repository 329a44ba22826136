"""How long a run still takes: by the usual iteration, with the evaluations and checkpoints that are still due."""

from tandem_files.pace import remaining_s


def rows(*seconds: float, evaluate_every: int = 0) -> list[dict[str, float | None]]:
    found: list[dict[str, float | None]] = []
    for number, busy in enumerate(seconds, 1):
        extra = 7.0 if evaluate_every and number % evaluate_every == 0 else 0.0
        found.append({"iteration": number, "iteration_s": busy + extra, "evaluate_s": extra, "checkpoint_s": None})
    return found


def left(found: list[dict[str, float | None]], total: int, every: int = 100) -> float | None:
    return remaining_s(found, total, evaluate_every=every, checkpoint_every=10)


def test_a_slow_iteration_changes_nothing() -> None:
    assert left(rows(2.0, 2.0, 60.0, 2.0), 10) == 12.0


def test_evaluations_count_when_they_are_due() -> None:
    """Of 5 to 10, iterations 6, 8 and 10 are evaluated; which one was the last makes no difference."""
    assert left(rows(1.0, 1.0, 1.0, 1.0, evaluate_every=2), 10, 2) == 6 * 1.0 + 3 * 7.0
    assert left(rows(1.0, 1.0, 1.0, evaluate_every=2), 10, 2) == 7 * 1.0 + 4 * 7.0


def test_the_last_iteration_is_evaluated_too() -> None:
    assert left(rows(1.0, 1.0, evaluate_every=2), 5, 2) == 3 * 1.0 + 2 * 7.0


def test_the_pace_is_that_of_the_recent_iterations() -> None:
    assert left(rows(*[9.0] * 30, *[1.0] * 20), 60) == 10.0


def test_nothing_is_known_before_the_first_iteration_and_nothing_left_after_the_last() -> None:
    assert left([], 10) is None
    assert left(rows(1.0, 1.0), 2) == 0.0
