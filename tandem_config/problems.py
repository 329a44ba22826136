"""Problems of a configuration, and the exception that carries all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from servicekit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """A problem of a configuration.

    Attributes:
        key: dotted key (`grpo.group_size`), or the offending option or file when no key can be named.
        value: the offending value as the user wrote it; "" when nothing was given.
        message: what is wrong, without key and value.
        suggestion: what to do about it; "" if there is no advice.
        where: `file:line` or the command-line option that gave the value; "" if unknown.
        severity: an error keeps a run from starting, a warning is only printed.
    """

    key: str
    value: str
    message: str
    suggestion: str = ""
    where: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        """Format as one line: `key = value: message (suggestion) [where]`."""
        head = f"{self.key} = {self.value}" if self.value else self.key
        tail = (f" ({self.suggestion})" if self.suggestion else "") + (f" [{self.where}]" if self.where else "")
        return f"{head}: {self.message}{tail}"


def problem(
    key: str,
    value: object,
    why: str,
    suggestion: str = "",
    *,
    where: str = "",
    severity: Literal["error", "warning"] = "error",
) -> ConfigProblem:
    """Make a problem of a value: texts stay as they are, true, false and null are YAML's."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)
    return ConfigProblem(key=key, value=text, message=why, suggestion=suggestion, where=where, severity=severity)


class ConfigErrors(ConfigError):
    """All problems of a configuration; `problems` is never empty."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def errors_only(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """Select the problems that keep a run from starting."""
    return [problem for problem in problems if problem.severity == "error"]
