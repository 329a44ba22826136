"""Prints `N passed, N failed, N skipped` from pytest's JUnit reports; exits 1 if no test ran or one failed.

python -m tools.test_summary REPORT.xml ...
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Outcomes of the test cases of one or more reports; an error in set-up or collection counts as failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            skipped=self.skipped + other.skipped,
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_report(path: Path) -> Counts:
    """Count the test cases of a report; a missing or truncated report has none.

    A test that fails and then again in its teardown is one failed test.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (FileNotFoundError, ElementTree.ParseError) as error:
        print(f"{path}: no usable test report ({error})", file=sys.stderr)
        return Counts()
    outcomes: dict[tuple[str | None, str | None], str] = {}
    for case in root.iter("testcase"):
        key = (case.get("classname"), case.get("name"))
        tags = {child.tag for child in case}
        if tags & {"failure", "error"} or outcomes.get(key) == "failed":
            outcomes[key] = "failed"
        else:
            outcomes[key] = "skipped" if "skipped" in tags else "passed"
    ended = list(outcomes.values())
    return Counts(passed=ended.count("passed"), failed=ended.count("failed"), skipped=ended.count("skipped"))


def main(arguments: Sequence[str]) -> int:
    """Print the sum over the reports `arguments`. Returns: the exit code."""
    total = sum((count_report(Path(argument)) for argument in arguments), Counts())
    print(total)
    return 1 if total.passed == 0 or total.failed > 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
