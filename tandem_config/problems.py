"""What is wrong with a configuration: one record per problem, and the exception that carries them all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from servicekit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """One thing to fix.

    Attributes:
        key: dotted key (`grpo.group_size`), or the offending option or file when no key can be named.
        value: the offending value as the user wrote it; "" when nothing was given.
        message: what is wrong, without key and value.
        suggestion: what to do about it; "" if there is nothing useful to say.
        where: `file:line` or the command-line option that gave the value; "" if unknown.
        severity: errors stop a run before it starts, warnings are printed and the run goes on.
    """

    key: str
    value: str
    message: str
    suggestion: str = ""
    where: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        """One line: `key = value: message (suggestion) [where]`."""
        head = f"{self.key} = {self.value}" if self.value else self.key
        tail = (f" ({self.suggestion})" if self.suggestion else "") + (f" [{self.where}]" if self.where else "")
        return f"{head}: {self.message}{tail}"


class ConfigErrors(ConfigError):
    """Every problem of a configuration at once; `problems` is never empty."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def errors_only(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """The problems that stop a run."""
    return [problem for problem in problems if problem.severity == "error"]
