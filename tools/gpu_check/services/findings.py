"""What was checked, and what came of it: each check is a name, what is wrong (nothing, if it passed), and figures."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """Checks in the order in which they were made, and what was not checked, with why.

    kept: what later checks compare theirs with.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def add(self, name: str, wrong: list[str], **figures: Any) -> None:
        """One check. Args: wrong: as text; empty: it passed. figures: JSON values."""
        self.checks.append({"name": name, "passed": not wrong, "wrong": wrong, **figures})
        text = "; ".join(wrong[:3]) if wrong else ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        print(f"gpu-check: {name}: {'FAILED: ' if wrong else ''}{text or 'passed'}", flush=True)

    def skip(self, why: str) -> None:
        """Something that cannot run here, named, with why."""
        self.skipped.append(why)

    @property
    def failed(self) -> list[str]:
        """List the names of the checks that did not pass."""
        return [check["name"] for check in self.checks if not check["passed"]]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
