"""Groups and scores as records of a ledger, and back: bit by bit as they came."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tandem_clients.flow import Completion, Group, GroupScores, Order, Prompt
from tandem_clients.transcript import Transcript
from tandem_files.ledger.records import Record

# Fields of GroupScores that JSON holds as they are.
_PLAIN = (
    *("accuracy", "accuracy_part", "num_errors", "first_error", "num_timeouts", "num_unreadable", "unreadable_rows"),
    *("num_absent", "num_parts_left_out", "remarks"),
)


def order_digest(prompts: Mapping[str, Prompt], order: Order, model: str) -> str:
    """Return a digest of what groups are sampled from, but for the policy's version.

    Args:
        model: what they depend on besides prompts and order, e.g. the fingerprint of the model that the run began with.
    """
    asked = asdict(order) | {"policy_version": model}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for group_id, prompt in prompts.items():
        digest.update(f"\n{group_id}\n{json.dumps(prompt.answer)}\n".encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:32]


def group_record(group: Group, order: str) -> Record:
    """Return a finished group as a record; its content: of each completion ids (u32), log-probs (f32), mask (u8).

    Args:
        order: `order_digest` of its iteration.
    """
    completions, content = [], []
    for completion in group.completions:
        mask = completion.loss_mask
        completions.append(
            [len(completion.token_ids), completion.truncated, mask is not None, completion.version_spans]
        )
        content += [completion.token_ids.tobytes(), completion.logprobs.tobytes()]
        content += [] if mask is None else [mask.tobytes()]
    fields: dict[str, Any] = {"group": group.group_id, "order": order, "completions": completions}
    if [one for one in group.completions if one.branches]:
        fields["branches"] = [one.branches for one in group.completions]
    if [one for one in group.completions if one.transcript is not None]:
        fields["transcripts"] = [one.transcript and asdict(one.transcript) for one in group.completions]
    return Record(kind="group", fields=fields, content=b"".join(content))


def read_group(record: Record, prompt: Prompt, versions: Mapping[int, int]) -> Group:
    """Return the group of a record.

    Args:
        versions: that the policies which have sampled it have now, by those that they had then.
    """
    completions, at = [], 0

    def taken(code: str, num: int, width: int) -> "array[Any]":
        nonlocal at
        items = array(code, record.content[at : at + num * width])
        at += num * width
        return items

    recorded = record.fields["completions"]
    transcripts = record.fields.get("transcripts", [None] * len(recorded))
    branches = record.fields.get("branches", [()] * len(recorded))
    for (num, truncated, has_mask, said), transcript, begins in zip(recorded, transcripts, branches, strict=True):
        spans = tuple((end, versions[version]) for end, version in said)
        completions.append(
            Completion(
                token_ids=taken("I", num, 4),
                logprobs=taken("f", num, 4),
                truncated=truncated,
                oldest_version=min(version for _, version in spans),
                version_spans=spans,
                loss_mask=taken("B", num, 1) if has_mask else None,
                transcript=transcript and Transcript(**transcript),
                branches=tuple(begins),
            )
        )
    return Group(group_id=record.fields["group"], prompt=prompt, completions=tuple(completions))


def versions_of(record: Record) -> set[int]:
    """Return the policy versions that have sampled a group."""
    return {version for *_, spans in record.fields["completions"] for _, version in spans}


def scores_record(scored: GroupScores, iteration: int, groups: Sequence[str], order: str, rewards: str) -> Record:
    """Return the scores of an iteration as a record.

    Args:
        groups: ids, in the order of the scores.
        order: `order_digest` of the wave in whose file it is.
        rewards: digest of what the scores depend on.
    """
    fields: dict[str, Any] = {name: getattr(scored, name) for name in _PLAIN}
    fields |= {
        "iteration": iteration,
        "groups": list(groups),
        "order": order,
        "rewards": rewards,
        "rewards_PG": scored.rewards_PG.tolist(),
        "missing_PG": None if scored.missing_PG is None else scored.missing_PG.tolist(),
        "parts": {name: values_PG.tolist() for name, values_PG in scored.parts.items()},
        "failures": [[place, dict(texts)] for place, texts in scored.failures.items()],
    }
    return Record(kind="scores", fields=fields)


def read_scores(record: Record) -> GroupScores:
    """Return the scores of a record."""
    fields = dict(record.fields)
    missing = fields["missing_PG"]
    return GroupScores(
        rewards_PG=np.array(fields["rewards_PG"], np.float64),
        missing_PG=None if missing is None else np.array(missing, np.bool_),
        parts={name: np.array(values, np.float64) for name, values in fields["parts"].items()},
        failures=dict(fields["failures"]),
        **{name: fields[name] for name in _PLAIN},
    )
