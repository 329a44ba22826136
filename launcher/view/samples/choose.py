"""Chooses the samples to show: by group, text, failure, reward or length. Pure, but for reading them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servicekit.errors import ConfigError
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import SampleHead, StoredSample

# Shown of each end if nothing else is asked for.
_ENDS = 2
# Most samples of a group or a search; further ones are counted.
_MOST = 20
_LISTED = 5

_ORDERS: dict[str, Callable[[SampleHead], float]] = {
    "best": lambda head: math.inf if head.reward is None else -head.reward,
    "worst": lambda head: math.inf if head.reward is None else head.reward,
    "longest": lambda head: -head.num_tokens,
    "shortest": lambda head: head.num_tokens,
}


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """What a user asks for.

    Attributes:
        iteration: None: the last one.
        kind: None: the training samples if there are any.
        group: a group's id, or a part of it (`g3`, `row77`).
        pattern: regular expression of prompt or completion.
        failed: only samples that a reward could not score.
        ends: (best, worst, longest or shortest; how many of these); empty: some of both ends by reward.
    """

    iteration: int | None = None
    kind: str | None = None
    group: str | None = None
    pattern: str | None = None
    failed: bool = False
    ends: Sequence[tuple[str, int]] = ()

    @property
    def filters(self) -> list[str]:
        """The options that leave samples out."""
        given = {"--group": self.group is not None, "--grep": self.pattern is not None, "--failed": self.failed}
        return [option for option, is_given in given.items() if is_given]


@dataclass(frozen=True, kw_only=True)
class SampleSelection:
    """The samples to show, and what they were chosen from.

    Attributes:
        kinds: all kinds of samples of the iteration.
        heads: all samples of this kind.
        filters: the options that left samples out.
        fitting: number of those that they left.
    """

    iteration: int
    kind: str
    kinds: Sequence[str]
    heads: Sequence[SampleHead]
    filters: Sequence[str]
    fitting: int
    samples: Sequence[StoredSample]


def choose(folder: SampleFolder, wanted: SampleQuery) -> SampleSelection:
    """Choose samples of one iteration. Raises: ConfigError: it, the kind or the group does not exist; a bad pattern."""
    iteration, kind = folder.resolve(wanted.iteration, wanted.kind)
    heads = folder.heads(iteration, kind)
    places = [place for place in _of_group(heads, wanted.group) if heads[place].errors or not wanted.failed]
    if wanted.pattern is not None:
        found = set(folder.matching(iteration, kind, wanted.pattern))
        places = [place for place in places if place in found]
    shown = _ends(heads, places, wanted)
    return SampleSelection(
        iteration=iteration,
        kind=kind,
        kinds=folder.iterations().get(iteration, [kind]),
        heads=heads,
        filters=wanted.filters,
        fitting=len(places),
        samples=folder.load(iteration, kind, shown),
    )


def _of_group(heads: Sequence[SampleHead], group: str | None) -> list[int]:
    if group is None:
        return list(range(len(heads)))
    places = [place for place, head in enumerate(heads) if group in (head.group_id, *head.group_id.split("."))]
    if not places:
        ids = list(dict.fromkeys(head.group_id for head in heads))
        known = ", ".join(ids[:_LISTED]) + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")
        raise ConfigError(f"no group {group!r} in this iteration; its groups: {known}")
    return places


def _ends(heads: Sequence[SampleHead], places: Sequence[int], wanted: SampleQuery) -> list[int]:
    if not wanted.ends and wanted.filters:
        return list(places[:_MOST])
    shown: dict[int, None] = {}
    for order, count in wanted.ends or (("best", _ENDS), ("worst", _ENDS)):
        shown.update(dict.fromkeys(sorted(places, key=lambda place: _ORDERS[order](heads[place]))[:count]))
    return list(shown)
