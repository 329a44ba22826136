"""Samples as messages of a RewardService: how large each is, and which go together."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from coordinator.rewards.base import ScoredText
from servicekit.rpc.limits import SAMPLE_CHUNK_BYTES, chunk_starts
from tandem_api.reward.v1 import reward_pb2

# 4 MiB: gRPC's own limit of a message, which servers in other languages have unless they set another.
_MOST_BYTES = SAMPLE_CHUNK_BYTES
# Upper bounds on the wire: a token id as a varint; the rest of a sample: tags, lengths and numbers.
_ID_BYTES, _OVERHEAD_BYTES = 5, 64


def batched(items: Sequence[ScoredText], *, most: int, whole_groups: bool, token_ids: bool) -> list[list[int]]:
    """Cut samples into calls of at most `most` samples and 4 MiB.

    Args:
        whole_groups: the completions of a prompt go together, also if they are more or larger. A sample that is larger
            goes alone.
        token_ids: the messages hold them.
    Returns: the places of the samples of each call.
    """
    units = [[place] for place in range(len(items))]
    if whole_groups:
        units = [list(group) for _, group in groupby(range(len(items)), key=lambda place: items[place].group)]
    sizes = wire_bytes(items, token_ids=token_ids)
    calls = []
    for few in _at_most(units, most):
        starts = chunk_starts([sum(sizes[place] for place in unit) for unit in few], _MOST_BYTES)
        for start, end in pairwise([0, *starts, len(few)]):
            calls.append([place for unit in few[start:end] for place in unit])
    return calls


def _at_most(units: Sequence[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Yield consecutive units with at most `most` places together; one with more comes alone."""
    few: list[list[int]] = []
    for unit in units:
        if few and sum(map(len, few)) + len(unit) > most:
            yield few
            few = []
        few.append(unit)
    if few:
        yield few


def wire_bytes(items: Sequence[ScoredText], *, token_ids: bool) -> list[int]:
    """Return upper bounds of what each sample adds to a message; the columns of a group's prompt are measured once."""
    columns: dict[int, int] = {}
    sizes = []
    for item in items:
        if item.group not in columns:
            columns[item.group] = _utf8_bytes(_json(item.columns))
        texts = (item.sample_id, item.prompt, item.completion, item.answer)
        ids = _ID_BYTES * (len(item.prompt_ids) + len(item.completion_ids)) if token_ids else 0
        sizes.append(sum(map(_utf8_bytes, texts)) + columns[item.group] + ids + _OVERHEAD_BYTES)
    return sizes


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def to_sample(item: ScoredText, *, token_ids: bool) -> reward_pb2.Sample:
    """Make the message of a sample."""
    return reward_pb2.Sample(
        sample_id=item.sample_id,
        group=item.group,
        prompt=item.prompt,
        completion=item.completion,
        answer=item.answer,
        columns_json=_json(item.columns),
        num_tokens=item.num_tokens,
        truncated=item.truncated,
        prompt_token_ids=item.prompt_ids if token_ids else (),
        completion_token_ids=item.completion_ids if token_ids else (),
    )


def _json(columns: Mapping[str, object]) -> str:
    return json.dumps(columns, ensure_ascii=False, default=str) if columns else ""
