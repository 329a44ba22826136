"""The report of `make chaos`: a table and a plot of seconds from a fault to progress, and what was wrong."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A fault and the seconds from its begin to the second iteration after it, with its promise.

    Attributes:
        usual_s: seconds of two iterations without a fault.
    """

    kind: str
    lasts_s: float
    seconds: float
    usual_s: float
    promise_s: float | None

    @property
    def is_late(self) -> bool:
        """Whether it took longer than is promised, two iterations besides."""
        return self.promise_s is not None and self.seconds > self.lasts_s + self.promise_s + self.usual_s


class ToReport(Protocol):
    """What came of a run."""

    name: str
    measured: list[Measured]
    wrong: list[str]
    accuracy: float | None
    iterations: int
    samples: dict[str, int]


def written(stories: Sequence[ToReport], folder: Path) -> str:
    """Write chaos.md and chaos.png. Returns: the former's text."""
    everything = [one for story in stories for one in story.measured]
    lines = [f"## All {len(everything)} faults", "", *_table(everything)]
    for story in stories:
        lines += [
            f"## {story.name}: {len(story.measured)} faults in {story.iterations} iterations",
            "",
            f"held-out accuracy: {story.accuracy}; samples: {story.samples}",
            "",
            *_table(story.measured),
            *(f"* WRONG: {text}" for text in story.wrong),
        ]
    text = "\n".join(lines)
    (folder / "chaos.md").write_text(text + "\n")
    _plot(stories, folder / "chaos.png")
    return text


def _table(measured: Sequence[Measured]) -> list[str]:
    by_kind = defaultdict(list)
    for one in measured:
        by_kind[one.kind].append(one)
    found = [
        "| fault | times | lasts, s | median s to progress | max | promised after its end | later |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, ones in sorted(by_kind.items()):
        seconds, lasts = [one.seconds for one in ones], [one.lasts_s for one in ones]
        promise = "-" if ones[0].promise_s is None else f"{ones[0].promise_s:g}"
        found.append(
            f"| {kind} | {len(ones)} | {min(lasts):.0f}-{max(lasts):.0f} | {median(seconds):.1f} | {max(seconds):.1f} "
            f"| {promise} | {sum(one.is_late for one in ones)} |"
        )
    return [*found, ""]


def _plot(stories: Sequence[ToReport], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    kinds = sorted({one.kind for story in stories for one in story.measured})
    for story in stories:
        axes.scatter(
            [one.seconds for one in story.measured],
            [kinds.index(one.kind) for one in story.measured],
            label=story.name,
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("seconds from the fault to progress")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
