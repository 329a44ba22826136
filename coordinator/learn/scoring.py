"""Step 4: groups to rewards. Decodes completions, lets every reward score them, and adds up the weighted scores.

Scores that fail become what the reward's `on_error` says. A few failures are tolerated; a reward that fails often stops
the run, which would train on wrong rewards.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rewards.base import ScoredText, Scores
from coordinator.rewards.registry import Part
from coordinator.rewards.work import MAX_LATE_SHARE, late_budget
from servicekit.errors import Internal, in_part
from servicekit.lifecycle.tasks import cancel
from tandem_clients.flow import Group, GroupScores
from tandem_clients.transcript import Transcript
from tandem_config.sections.environment import EnvironmentSection
from tandem_files.tokenizer import TextCodec


class Scorer:
    """Scores groups with all rewards of the run.

    Args:
        parts: the rewards, started; one of them is the accuracy.
        codec: decodes groups; None: texts are scored only.
        stop_ids: further ids that end a completion (grpo.stop_token_ids).
        skip_special_tokens: rollout.skip_special_tokens.
        environment: what an episode gets whose environment fails; None: there is none.
    """

    def __init__(
        self,
        *,
        parts: Sequence[Part],
        codec: TextCodec | None,
        stop_ids: Collection[int] = (),
        skip_special_tokens: bool = False,
        environment: EnvironmentSection | None = None,
    ) -> None:
        self._parts, self._environment = parts, environment
        self._codec = codec
        self._decoding: dict[str, Any] = {"stop_ids": stop_ids, "skip_special_tokens": skip_special_tokens}
        (self._accuracy,) = [part.name for part in parts if part.is_accuracy]

    async def score(self, groups: Sequence[Group], *, is_batch: bool = True) -> GroupScores:
        """Score P groups of G completions scores. Returns: [P, G] rewards, and counts of failed scores.

        Args:
            is_batch: they are as many as shares of failed scores are judged by.
        Raises: Internal: scoring failed for more samples than a reward's max_error_share, or at all with `on_error:
            stop`, or took too long for more than 25 %.
        """
        items = self._items(groups)
        found = await self.score_items(items)
        for part, scores in found:
            if is_batch and (why := over_budget(part, scores, items)):
                raise Internal(why)
        scores_SR = {part.name: _scores(scores) for part, scores in found}
        rewards_S, missing_S = added(found)
        lost = self._lost(items, is_batch=is_batch)
        rewards_S[[*lost]] = 0.0
        missing_S[[*lost]] |= self._environment is not None and self._environment.on_error == "drop"
        failed = [*lost.values(), *(_first(part, scores, items) for part, scores in found if scores.errors)]
        right_S = scores_SR[self._accuracy][~missing_S & ~np.isnan(scores_SR[self._accuracy])]
        failures = failures_of(found)
        unreadable = {place: why for _, scores in found for place, why in scores.unreadable.items()}
        return GroupScores(
            rewards_PG=rewards_S.reshape(len(groups), -1),
            missing_PG=missing_S.reshape(len(groups), -1),
            accuracy=float(right_S.mean()) if right_S.size else math.nan,
            accuracy_part=self._accuracy,
            parts={name: values_S.reshape(len(groups), -1) for name, values_S in self._shown(found, scores_SR).items()},
            failures=failures | {place: {"environment": why} | failures.get(place, {}) for place, why in lost.items()},
            num_errors=int(_mask([lost, *(scores.errors for _, scores in found)], len(items)).sum()),
            first_error=next(iter(failed), ""),
            num_timeouts=int(_mask([scores.late for _, scores in found], len(items)).sum()),
            num_unreadable=len(unreadable),
            unreadable_rows={groups[items[place].group].prompt.place: why for place, why in unreadable.items()},
            num_absent=sum(len(scores.absent) for _, scores in found),
            num_parts_left_out=sum(scores.parts.num_left_out for _, scores in found),
            remarks=remarks_of(found, len(items)),
        )

    def _lost(self, items: Sequence[ScoredText], *, is_batch: bool) -> dict[int, str]:
        """Return the episodes whose environment has failed, and why. Raises: Internal: they are too many."""
        lost = {place: item.episode_error for place, item in enumerate(items) if item.episode_error}
        if self._environment is None or not lost or not is_batch:
            return lost
        most = 0.0 if self._environment.on_error == "stop" else self._environment.max_error_share
        if len(lost) > most * len(items):
            first, *_ = lost.values()
            whys = Counter(why.partition(": ")[2] for why in lost.values())  # behind the episode's name
            del whys[first.partition(": ")[2]]
            others = "".join(f"; {count} of them: {why}" for why, count in whys.most_common(3))
            raise Internal(
                f"environment: {len(lost)} of {len(items)} episodes failed, more than environment.max_error_share = "
                f"{most:.0%} (0 with on_error: stop); the first: {first}{others}"
            )
        return lost

    def _shown(
        self, found: Sequence[tuple[Part, Scores]], scores_SR: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, NDArray[np.float64]]:
        """Return what is reported, in its order: the accuracy, the other rewards as configured, parts of scores."""
        parts_S = {
            f"{part.name}_{name}": np.array(values_S, dtype=np.float64)
            for part, scores in found
            for name, values_S in scores.parts.values.items()
        }
        others = {name: values_S for name, values_S in parts_S.items() if name not in scores_SR}
        return {self._accuracy: scores_SR[self._accuracy], **scores_SR, **others}

    def texts(self, groups: Sequence[Group]) -> list[str]:
        """Return the completions' texts as the rewards read them."""
        assert self._codec is not None, "groups have token ids"
        ids = (completion.last_turn_ids for group in groups for completion in group.completions)
        return self._codec.decode(ids, **self._decoding)

    def _items(self, groups: Sequence[Group]) -> list[ScoredText]:
        texts = iter(self.texts(groups))
        return [
            ScoredText(
                completion=next(texts),
                answer=group.prompt.answer,
                truncated=completion.truncated,
                num_tokens=completion.num_sampled,
                prompt=group.prompt.text,
                messages=_before_last_turn(group.prompt.messages, completion.transcript),
                columns=group.prompt.columns,
                sample_id=group.sample_id(index),
                group=place,
                prompt_ids=group.prompt.token_ids,
                completion_ids=completion.token_ids,
                episode_reward=None if completion.transcript is None else completion.transcript.reward,
                episode_error="" if completion.transcript is None else completion.transcript.error,
            )
            for place, group in enumerate(groups)
            for index, completion in enumerate(group.completions)
        ]

    async def score_items(self, items: Sequence[ScoredText]) -> list[tuple[Part, Scores]]:
        """Let all rewards score at the same time. Returns: all scores, however many failed."""
        scoring = [asyncio.create_task(_score(part, items), name=f"reward {part.name}") for part in self._parts]
        try:
            return list(zip(self._parts, await asyncio.gather(*scoring), strict=True))
        finally:
            await cancel(*scoring)


def _before_last_turn(
    messages: Sequence[Mapping[str, Any]] | None, transcript: Transcript | None
) -> Sequence[Mapping[str, Any]] | None:
    """Return the messages of a prompt, and those of an episode before the policy's last turn."""
    if transcript is None or messages is None:
        return messages
    said = transcript.messages
    last = max((place for place, message in enumerate(said) if message["role"] == "assistant"), default=0)
    return [*messages, *said[:last]]


async def _score(part: Part, items: Sequence[ScoredText]) -> Scores:
    with in_part(f"reward {part.name}"):
        return await part.reward.score(items)


def added(found: Sequence[tuple[Part, Scores]]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Add the weighted scores of S samples.

    Returns: [S] rewards; [S] True: the sample has none, because a score failed with `on_error: drop`, or no reward that
        is trained on applies.
    """
    scores_RS = [_scores(scores) for _, scores in found]
    size = scores_RS[0].size
    missing_S = _mask([_failed(scores) for part, scores in found if part.on_error == "drop"], size)
    trained_on = [np.isnan(scores_S) for (part, _), scores_S in zip(found, scores_RS, strict=True) if part.weight != 0]
    weighted = [part.weight * scores_S for (part, _), scores_S in zip(found, scores_RS, strict=True)]
    return np.nansum(weighted, axis=0), missing_S | np.all(trained_on, axis=0)


def over_budget(part: Part, scores: Scores, items: Sequence[ScoredText]) -> str:
    """Return why a run ends when so many of a reward's scores fail; "": it does not."""
    total, failed = len(items), _failed(scores)
    if failed and part.on_error == "stop":
        return (
            f"reward {part.name}: scoring failed for {len(failed)} of {total} completions, and {part.key}.on_error is "
            f"stop; first failure: {_first(part, scores, items)}"
        )
    if len(scores.errors) > part.max_error_share * total:
        return (
            f"reward {part.name}: scoring failed for {len(scores.errors)} of {total} completions, more than "
            f"{part.key}.max_error_share = {part.max_error_share:.0%}; first failure: {_first(part, scores, items)}"
        )
    if len(scores.late) > late_budget(total):
        return (
            f"reward {part.name}: scoring took longer than {part.key}.timeout_s for {len(scores.late)} of {total} "
            f"completions (the rest was not tried), more than {MAX_LATE_SHARE:.0%}: simplify {part.key}.pattern "
            f"(quantifiers within quantifiers take exponential time), or raise {part.key}.timeout_s and "
            f"{part.key}.workers"
        )
    return ""


def _scores(scores: Scores) -> NDArray[np.float64]:
    """Return [S] scores; NaN: the reward does not apply."""
    values_S = np.array(scores.values, dtype=np.float64)
    values_S[list(scores.absent)] = np.nan
    return values_S


def remarks_of(found: Sequence[tuple[Part, Scores]], size: int) -> dict[str, str]:
    """Return warnings for the run's user, each once, by what they are about."""
    remarks = {
        f"{part.name}.{name}": f"reward {part.name}: {text}"
        for part, scores in found
        for name, text in scores.parts.remarks.items()
    }
    return remarks | {
        part.name: f"reward {part.name} returned None for all of {size} completions: it applies to none of them, or "
        "its function lacks a return"
        for part, scores in found
        if size and len(scores.absent) == size
    }


def _failed(scores: Scores) -> set[int]:
    return {*scores.errors, *scores.late}


def failures_of(found: Sequence[tuple[Part, Scores]]) -> dict[int, dict[str, str]]:
    """Return why rewards failed, by the samples' places and the rewards' names."""
    failures: dict[int, dict[str, str]] = {}
    for part, scores in found:
        for place in sorted(_failed(scores)):
            failures.setdefault(place, {})[part.name] = _why(part, scores, place)
    return failures


def _why(part: Part, scores: Scores, place: int) -> str:
    return scores.errors.get(place, f"it took longer than {part.key}.timeout_s")


def _mask(places: Sequence[Collection[int]], size: int) -> NDArray[np.bool_]:
    """Return [S] True at all of the places."""
    mask = np.zeros(size, dtype=np.bool_)
    for some in places:
        mask[list(some)] = True
    return mask


def _first(part: Part, scores: Scores, items: Sequence[ScoredText]) -> str:
    """Describe the first failure: sample, reward, reason."""
    place = min(_failed(scores))
    return f"{part.name} of {items[place].sample_id}: {_why(part, scores, place)}"


def joined(parts: Sequence[GroupScores]) -> GroupScores:
    """Return the scores of the groups of all parts, in their order."""
    first, *others = parts
    if not others:
        return first
    starts = np.cumsum([0, *[one.rewards_PG.size for one in parts]]).tolist()
    names = dict.fromkeys(name for one in parts for name in one.parts)
    absent = [np.full(one.rewards_PG.shape, np.nan) for one in parts]
    present_PG = np.concatenate([one.present_PG for one in parts])
    whole = GroupScores(
        rewards_PG=np.concatenate([one.rewards_PG for one in parts]),
        missing_PG=~present_PG,
        accuracy=math.nan,
        accuracy_part=first.accuracy_part,
        parts={
            name: np.concatenate([one.parts.get(name, no_PG) for one, no_PG in zip(parts, absent, strict=True)])
            for name in names
        },
        failures={
            start + place: texts
            for start, one in zip(starts, parts, strict=False)
            for place, texts in one.failures.items()
        },
        num_errors=sum(one.num_errors for one in parts),
        first_error=next((one.first_error for one in parts if one.first_error), ""),
        num_timeouts=sum(one.num_timeouts for one in parts),
        num_unreadable=sum(one.num_unreadable for one in parts),
        unreadable_rows={place: why for one in parts for place, why in one.unreadable_rows.items()},
        num_absent=sum(one.num_absent for one in parts),
        num_parts_left_out=sum(one.num_parts_left_out for one in parts),
        remarks={about: text for one in parts for about, text in one.remarks.items()},
    )
    right_S = whole.scores_PG[~np.isnan(whole.scores_PG)]
    return replace(whole, accuracy=float(right_S.mean()) if right_S.size else math.nan)
