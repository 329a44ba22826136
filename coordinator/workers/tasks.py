"""Tasks of workers, by name: each takes settings (JSON) and returns the work, a function of a job (JSON)."""

from collections.abc import Callable
from typing import Any

from coordinator.workers import math_answers, own_code, patterns
from coordinator.workers.task import Work

REGEX, FORMAT, MATH, ANSWERS, FUNCTION = "regex", "format", "math_verify", "answers", "function"
ENVIRONMENT = "environment"


def _environment(**settings: Any) -> Work:
    from coordinator.workers.episodes import serving  # pydantic: 0.1 s

    return serving.load(**settings)


TASKS: dict[str, Callable[..., Work]] = {
    REGEX: lambda **settings: Work(call=patterns.scorer(**settings)),
    FORMAT: lambda **settings: Work(call=patterns.form_scorer(**settings)),
    MATH: lambda **settings: Work(call=math_answers.scorer(**settings)),
    ANSWERS: lambda: Work(call=math_answers.reader()),
    FUNCTION: own_code.load,
    ENVIRONMENT: _environment,
}
