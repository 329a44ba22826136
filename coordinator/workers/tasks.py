"""Tasks of reward workers, by name: each takes settings (JSON) and returns the work, a function of a job (JSON)."""

from collections.abc import Callable

from coordinator.workers import math_answers, own_code, patterns
from coordinator.workers.task import Work

REGEX, FORMAT, MATH, ANSWERS, FUNCTION = "regex", "format", "math_verify", "answers", "function"

TASKS: dict[str, Callable[..., Work]] = {
    REGEX: lambda **settings: Work(call=patterns.scorer(**settings)),
    FORMAT: lambda **settings: Work(call=patterns.form_scorer(**settings)),
    MATH: lambda **settings: Work(call=math_answers.scorer(**settings)),
    ANSWERS: lambda: Work(call=math_answers.reader()),
    FUNCTION: own_code.load,
}
