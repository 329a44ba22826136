"""Stored samples of made-up runs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import SCHEMA, TRAINED, StoredSample, storable, table_of


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


def write_samples(folder: SampleFolder, iteration: int, kind: str, samples: Sequence[StoredSample]) -> int:
    """Store samples. Returns: the file's bytes."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    columns["prompt"] = [storable(text) for text in columns["prompt"]]
    for name in ("reward_parts", "errors"):
        columns[name] = [list(values.items()) for values in columns[name]]
    for name in ("version_spans", "masked_spans"):
        columns[name] = [[asdict(span) for span in spans] for spans in columns[name]]
    return folder.write(iteration, kind, table_of(len(samples), **columns))
