"""Makes the table of an iteration's samples, column by column: a loop over samples would hold the GIL for longer.

Legend: P prompts, G completions per prompt, S = P * G samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from coordinator.rewards.taken import ShownColumns
from tandem_clients.flow import Completion, Generation, GroupScores
from tandem_files.samples.schema import MASKED_SPAN, SPAN, MaskedSpan, storable, table_of
from tandem_files.tokenizer import TextCodec

_TEXTS = pa.list_(pa.string())
_TOKENS_BEFORE = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the samples of one kind have in common, and their arrays.

    Attributes:
        advantages_PG: None: of an evaluation.
        uses_PG: what became of each sample in training (tandem_files.samples.schema).
    """

    iteration: int
    kind: str
    generation: Generation
    scored: GroupScores
    advantages_PG: NDArray[np.float64] | None
    uses_PG: NDArray[np.str_]


def table_of_batch(batch: Batch, codec: TextCodec, *, token_ids: bool, taken: ShownColumns) -> pa.Table:
    """Make the table.

    Args:
        token_ids: with each completion's.
        taken: the columns that rewards take.
    """
    groups = batch.generation.groups
    completions = [completion for group in groups for completion in group.completions]
    size = len(completions)
    owners = pa.array(np.repeat(np.arange(len(groups)), [len(group.completions) for group in groups]))

    def of_group(values: Sequence[Any]) -> pa.Array:
        return pa.array(values).take(owners)

    def of_all(value: Any) -> pa.Array:
        return pa.repeat(pa.scalar(value), size)

    prompts = codec.decode_all(group.prompt.token_ids for group in groups)
    return table_of(
        size,
        iteration=of_all(batch.iteration),
        kind=of_all(batch.kind),
        group_id=of_group([group.group_id for group in groups]),
        sample=np.concatenate([np.arange(len(group.completions)) for group in groups]),
        source=of_group([storable(group.prompt.file) for group in groups]),
        row=of_group([group.prompt.row for group in groups]),
        prompt=of_group([storable(text) for text in prompts]),
        completion=codec.decode_all(completion.token_ids for completion in completions),
        answer=of_group([storable(group.prompt.answer) for group in groups]),
        columns=of_group([json.dumps(dict(group.prompt.columns), default=str) for group in groups]),
        reward_columns=pa.array([taken.within(group.prompt.columns) for group in groups], _TEXTS).take(owners),
        reward=pa.array(batch.scored.rewards_PG.ravel(), mask=~batch.scored.present_PG.ravel()),
        reward_parts=_parts(batch.scored.parts, size),
        errors=_errors(batch.scored.failures, size),
        advantage=None if batch.advantages_PG is None else batch.advantages_PG.ravel(),
        prompt_tokens=of_group([len(group.prompt.token_ids) for group in groups]),
        num_tokens=[len(completion.token_ids) for completion in completions],
        finish_reason=["length" if completion.truncated else "stop" for completion in completions],
        use=batch.uses_PG.ravel().tolist(),
        policy_version=[completion.oldest_version for completion in completions],
        version_spans=_spans(completions, codec),
        masked_spans=_masked_spans(completions, codec),
        transcript=[None if one.transcript is None else json.dumps(asdict(one.transcript)) for one in completions],
        token_ids=[list(completion.token_ids) for completion in completions] if token_ids else None,
    )


def _parts(parts: Mapping[str, NDArray[np.float64]], size: int) -> pa.Array:
    """Make the column of scores by the reward's name, of those that a sample has."""
    scores_SR = np.stack([part_PG.ravel() for part_PG in parts.values()], axis=1) if parts else np.zeros((size, 0))
    there_SR = ~np.isnan(scores_SR)
    offsets = np.concatenate([[0], np.cumsum(there_SR.sum(axis=1))]).astype(np.int32)
    names = pa.array([storable(name) for name in parts], pa.string()).take(pa.array(np.nonzero(there_SR)[1]))
    return pa.MapArray.from_arrays(pa.array(offsets), names, pa.array(scores_SR[there_SR], pa.float64()))


def _errors(failures: Mapping[int, Mapping[str, str]], size: int) -> pa.Array | None:
    """Make the column of failed scores: null for a sample without one; None: there is no failed one."""
    if not failures:
        return None
    rows = [[(storable(name), storable(why)) for name, why in failures.get(place, {}).items()] for place in range(size)]
    return pa.array([row or None for row in rows], pa.map_(pa.string(), pa.string()))


def _spans(completions: Sequence[Completion], codec: TextCodec) -> pa.Array:
    """Make the column of version spans; a completion of one version, so nearly each, has none.

    Where a span ends in the text is found by decoding the tokens before its end.
    """
    several = [completion if len(completion.version_spans) > 1 else None for completion in completions]
    counts = [0 if completion is None else len(completion.version_spans) for completion in several]
    mixed = [completion for completion in several if completion is not None]
    spans = [span for completion in mixed for span in completion.version_spans]
    texts = codec.decode_all(completion.token_ids[:end] for completion in mixed for end, _ in completion.version_spans)
    values = pa.StructArray.from_arrays(
        [
            pa.array([end for end, _ in spans], pa.int32()),
            pa.array([len(text) for text in texts], pa.int32()),
            pa.array([version for _, version in spans], pa.int64()),
        ],
        fields=list(SPAN),
    )
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *counts]), pa.int32()), values)


def _masked_spans(completions: Sequence[Completion], codec: TextCodec) -> pa.Array | None:
    """Make the column of tokens that the policy has not sampled: null where there are none; None: nowhere are any."""
    if all(completion.loss_mask is None for completion in completions):
        return None
    spans = [[asdict(span) for span in _masked(completion, codec)] or None for completion in completions]
    return pa.array(spans, pa.list_(MASKED_SPAN))


def _masked(completion: Completion, codec: TextCodec) -> Iterator[MaskedSpan]:
    """Find the runs of masked tokens, and where they are in the text.

    Each part between their ends is decoded once, behind a few tokens before it, which are decoded without it too: some
    tokenizers leave out the space at the beginning of a text.
    """
    if completion.loss_mask is None:
        return
    places = np.flatnonzero(np.diff(np.array([1, *completion.loss_mask, 1], np.int8))).tolist()
    parts = [(max(0, start - _TOKENS_BEFORE), start, end) for start, end in pairwise([0, *places])]
    whole = codec.decode_all(completion.token_ids[first:end] for first, _, end in parts)
    before = codec.decode_all(completion.token_ids[first:start] for first, start, _ in parts)
    ends = np.cumsum([len(text) - len(left) for text, left in zip(whole, before, strict=True)]).tolist()
    for start, end, text_start, text_end in zip(places[::2], places[1::2], ends[::2], ends[1::2], strict=True):
        yield MaskedSpan(start=start, end=end, text_start=text_start, text_end=text_end)
