"""Stored samples of made-up runs."""

from typing import Any

from tandem_files.samples.schema import TRAINED, StoredSample


def stored(group: int = 0, sample: int = 0, **changes: Any) -> StoredSample:
    """Make a stored sample of iteration 1."""
    values: dict[str, Any] = {
        "kind": "train",
        "iteration": 1,
        "group_id": f"i1.g{group}.row{group + 1}",
        "sample": sample,
        "source": "train.jsonl",
        "row": group + 1,
        "prompt": "1+2=",
        "completion": "3<eos>",
        "answer": "3",
        "reward": 1.0,
        "advantage": 0.5,
        "prompt_tokens": 4,
        "num_tokens": 2,
        "finish_reason": "stop",
        "use": TRAINED,
        "policy_version": 0,
    }
    return StoredSample(**values | changes)
