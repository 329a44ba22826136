"""Tasks of reward workers, by name: each takes settings (JSON) and returns a function of a job (JSON in and out)."""

from collections.abc import Callable
from typing import Any

from coordinator.learn.rewards import math_answers, patterns

Work = Callable[[dict[str, Any]], Any]
REGEX, MATH, ANSWERS = "regex", "math_verify", "answers"

TASKS: dict[str, Callable[..., Work]] = {
    REGEX: patterns.scorer,
    MATH: math_answers.scorer,
    ANSWERS: math_answers.reader,
}
