"""The page's samples: groups of one iteration, chosen and sorted, with bounded texts. Runs in the connection's thread.

Reads the files that the run has written, so that it works the same during a run and afterwards.
"""

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np

from servicekit.errors import InvalidRequest, Unavailable
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import SampleHead, StoredSample, mean_reward, plain, taken_columns

# Groups of one answer, and samples of a group.
_MOST_GROUPS, _MOST_SAMPLES = 20, 64
_GROUPS = 6
# Characters of all texts of an answer; each text gets an equal share within these bounds.
_ALL_TEXT, _LEAST_TEXT, _MOST_TEXT = 2**20, 400, 20_000
# Most characters of a column that a reward takes.
_MOST_COLUMN = 200
# Share of a shortened text that is its beginning; the rest is its end, where answers are.
_BEGINNING = 0.7
# Readers wait for each other, so that pages that are open in many browsers do not take the coordinator's time.
_TURN_S = 5.0
# For the search of an earlier iteration of a row.
_SEARCH_S = 2.0

Members = list[tuple[int, SampleHead]]


def _mean_reward(members: Members) -> float:
    mean = mean_reward(head for _, head in members)
    return 0.0 if mean is None else mean


def _spread(members: Members) -> float:
    rewards = [head.reward for _, head in members if head.reward is not None]
    return float(np.std(rewards)) if rewards else 0.0


def _reward_first(sign: float) -> Callable[[SampleHead], float]:
    """Order by reward times `sign`; samples without one are the last in every order."""
    return lambda head: math.inf if head.reward is None else sign * head.reward


_GROUP_ORDERS: dict[str, Callable[[Members], float]] = {
    "worst": _mean_reward,
    "best": lambda members: -_mean_reward(members),
    "mixed": lambda members: -_spread(members),
    "longest": lambda members: -float(np.mean([head.num_tokens for _, head in members])),
    "shortest": lambda members: float(np.mean([head.num_tokens for _, head in members])),
    "order": lambda members: members[0][0],
}
_SAMPLE_ORDERS: dict[str, Callable[[SampleHead], float]] = {
    "worst": _reward_first(1.0),
    "best": _reward_first(-1.0),
    "mixed": _reward_first(-1.0),
    "longest": lambda head: -head.num_tokens,
    "shortest": lambda head: head.num_tokens,
    "order": lambda head: head.sample,
}


class SamplePages:
    """Answers the page's requests for samples of one run."""

    def __init__(self, folder: SampleFolder) -> None:
        self._folder = folder
        self._turn = threading.Lock()

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer with groups of an iteration.

        Args:
            query: `iteration`, `kind` (default: the last of the training data), `sort` (a key of _GROUP_ORDERS),
                `search` (a regular expression), `offset` and `limit` in groups, `group` (only this one),
                `sample` (only this one of it, with its whole text).
        Raises: ConfigError: there are no such samples; InvalidRequest: a value that is not allowed; Unavailable.
        """
        with self._reading():
            iteration, kind = self._folder.resolve(_number(query, "iteration"), query.get("kind") or None)
            sort = query.get("sort", "worst")
            if sort not in _GROUP_ORDERS:
                raise InvalidRequest(f"sort {sort!r} is not one of {', '.join(_GROUP_ORDERS)}")
            found = _grouped(self._folder.heads(iteration, kind))
            hits = None
            if query.get("search"):
                hits = set(self._folder.matching(iteration, kind, query["search"]))
                found = [members for members in found if any(place in hits for place, _ in members)]
            if query.get("group"):
                found = [members for members in found if members[0][1].group_id == query["group"]]
            found.sort(key=_GROUP_ORDERS[sort])
            offset = _number(query, "offset") or 0
            limit = min(_MOST_GROUPS, _GROUPS if (asked := _number(query, "limit")) is None else asked)
            shown = self._loaded(iteration, kind, found[offset : offset + limit], sort, _number(query, "sample"))
            stored = self._folder.iterations()
        return {
            "iteration": iteration,
            "kind": kind,
            "kinds": stored.get(iteration, [kind]),
            "iterations": [number for number, kinds in stored.items() if kind in kinds],
            "all_kinds": sorted({name for kinds in stored.values() for name in kinds}),
            "num_groups": len(found),
            "offset": offset,
            "groups": shown,
        }

    def earlier(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer with the group of the same data row in an earlier iteration.

        Args:
            query: `kind`, `source`, `row` of the group; `before`: its iteration; `order`: `earlier` (the last time of
                the row before) or `first`; `sort`.
        Returns: iteration and group, both null if none was found.
        """
        kind, source, row = query.get("kind", ""), query.get("source", ""), _number(query, "row")
        before = _number(query, "before") or 0
        deadline_s = time.monotonic() + _SEARCH_S
        with self._reading():
            stored = [
                number for number, kinds in self._folder.iterations().items() if kind in kinds and number < before
            ]
            for number in stored if query.get("order") == "first" else reversed(stored):
                found = [
                    members
                    for members in _grouped(self._folder.heads(number, kind))
                    if members[0][1].row == row and members[0][1].source == source
                ]
                if found:
                    (group,) = self._loaded(number, kind, found[:1], query.get("sort", "worst"), None)
                    return {"iteration": number, "group": group}
                if time.monotonic() > deadline_s:
                    break
        return {"iteration": None, "group": None}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=_TURN_S):
            raise Unavailable("other requests for samples take too long: try again")
        try:
            yield
        finally:
            self._turn.release()

    def _loaded(
        self, iteration: int, kind: str, groups: Sequence[Members], sort: str, only: int | None
    ) -> list[dict[str, Any]]:
        """Load groups with their texts. only: one sample of them, with its whole text."""
        order = _SAMPLE_ORDERS.get(sort, _SAMPLE_ORDERS["order"])
        chosen = [
            sorted((m for m in members if only in (None, m[1].sample)), key=lambda m: order(m[1]))[:_MOST_SAMPLES]
            for members in groups
        ]
        places = [place for members in chosen for place, _ in members]
        samples = iter(self._folder.load(iteration, kind, places))
        limit = _ALL_TEXT if only is not None else max(_LEAST_TEXT, min(_MOST_TEXT, _ALL_TEXT // max(1, len(places))))
        return [
            _group([next(samples) for _ in shown], members, limit)
            for shown, members in zip(chosen, groups, strict=True)
            if shown
        ]


def _grouped(heads: Sequence[SampleHead]) -> list[Members]:
    groups: dict[str, Members] = {}
    for place, head in enumerate(heads):
        groups.setdefault(head.group_id, []).append((place, head))
    return list(groups.values())


def _group(samples: Sequence[StoredSample], members: Members, limit: int) -> dict[str, Any]:
    """Describe a group by the samples that are shown and all its members."""
    first = samples[0]
    return {
        "group_id": first.group_id,
        "kind": first.kind,
        "source": first.source,
        "row": first.row,
        "prompt": shortened(first.prompt, limit),
        "answer": shortened(first.answer, limit),
        "columns": {name: shortened(text, _MOST_COLUMN) for name, text in taken_columns(first).items()},
        "reward_mean": mean_reward(head for _, head in members),
        "num_samples": len(members),
        "samples": [_sample(sample, limit) for sample in samples],
    }


def _sample(sample: StoredSample, limit: int) -> dict[str, Any]:
    values = plain(sample)
    names = ("sample", "reward", "reward_parts", "advantage", "num_tokens", "finish_reason", "use", "policy_version")
    errors = {name: shortened(why, limit) for name, why in sample.errors.items()}
    said = values["transcript"]
    turns = said and {
        "rewards": said["rewards"],
        "contexts": 1 + sum(message.get("branch", False) for message in said["messages"]),
        "end": said["end"],
        "error": shortened(said["error"], limit),
    }
    return {
        **{name: values[name] for name in names},
        "errors": errors,
        "segments": segments(sample, limit),
        "turns": turns,
    }


def shortened(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters, with a note of what is left out of its middle."""
    if len(text) <= limit:
        return text
    head = int(limit * _BEGINNING)
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit:,} characters ...] {text[len(text) - tail :]}"


def segments(sample: StoredSample, limit: int) -> list[dict[str, Any]]:
    """Cut a completion where its policy version or its loss mask changes, without its middle beyond `limit` characters.

    Returns: `text` and `version` of each segment, and `masked` if the policy has not sampled it; or the number of
        characters that are `left_out` between two.
    """
    text = sample.completion
    head, total = int(limit * _BEGINNING), len(text)
    kept = [(0, total)] if total <= limit else [(0, head), (total - (limit - head), total)]
    runs = list(_runs(sample))
    found: list[dict[str, Any]] = []
    for index, (start, stop) in enumerate(kept):
        if index:
            found.append({"left_out": total - limit})
        begin = start
        for end, about in runs:
            if begin < min(end, stop):
                found.append({"text": text[begin : min(end, stop)], **about})
                begin = min(end, stop)
    return found


def _runs(sample: StoredSample) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the end of each run of characters, ascending, with its version and whether it is masked."""
    total = len(sample.completion)
    versions = [(span.text_end, span.policy_version) for span in sample.version_spans] or [(0, sample.policy_version)]
    versions[-1] = (total, versions[-1][1])
    masked = [(span.text_start, min(span.text_end, total)) for span in sample.masked_spans]
    for end in sorted({end for end, _ in versions}.union(*masked)):
        _, version = versions[min(bisect_left(versions, end, key=itemgetter(0)), len(versions) - 1)]
        before = bisect_left(masked, end, key=itemgetter(0)) - 1  # the last that starts before
        is_masked = before >= 0 and end <= masked[before][1]
        yield end, {"version": version} | ({"masked": True} if is_masked else {})


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if text in ("", "last"):
        return None
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"{name} {text!r} is not a number")
    return int(text)
