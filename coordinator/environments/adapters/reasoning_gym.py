"""Reasoning Gym: writes rows of its data sets, and scores answers to them; a turn is an episode, without environment.

python -m coordinator.environments.adapters.reasoning_gym chain_sum --size 1000 --seed 1 > train.jsonl
"""

import argparse
import difflib
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.environments.adapters import library

reasoning_gym = library("reasoning_gym", "reasoning-gym")

# The column of what scoring needs: the data set, its configuration, and the entry.
COLUMN = "reasoning_gym"
_MAX_DATASETS = 64


def rows(dataset: str, size: int, seed: int, config: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Draw rows, the same for the same arguments and version of the library.

    Args:
        config: other fields of the data set's configuration.
    Raises: ValueError: no such data set or field, or an entry that does not score alike once it is JSON.
    """
    given = {**(config or {}), "size": size, "seed": seed}
    source = _dataset(dataset, json.dumps(given, sort_keys=True))
    for index in range(size):
        entry = source[index]
        answer = entry["answer"]
        try:
            kept = json.loads(json.dumps(entry, default=_plain))
            same = source.score_answer(answer, kept) == source.score_answer(answer, entry)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{dataset}: entry {index} cannot be a row, its scorer needs other types: {error}"
            ) from error
        if not same:
            raise ValueError(f"{dataset}: entry {index} cannot be a row, as JSON it scores its answer otherwise")
        about = {"dataset": dataset, "config": json.dumps(given, sort_keys=True), "entry": json.dumps(kept)}
        yield {"prompt": entry["question"], "answer": "" if answer is None else str(answer), COLUMN: about}


def score(completion: str, reasoning_gym: Mapping[str, str]) -> float:
    """Score a completion, from 0 to 1: what is in its last <answer> tag, else all that follows its thoughts.

    Args:
        reasoning_gym: the column of the row.
    """
    source = _dataset(reasoning_gym["dataset"], reasoning_gym["config"])
    tagged = library("reasoning_gym.utils", "reasoning-gym").extract_answer(completion)
    answer = completion.rpartition("</think>")[2].strip() if tagged is None else tagged
    return float(source.score_answer(answer, json.loads(reasoning_gym["entry"])))


@functools.lru_cache(maxsize=_MAX_DATASETS)
def _dataset(name: str, config: str) -> Any:
    """Build a data set. Raises: ValueError: there is none, or it has no such configuration."""
    known = library("reasoning_gym.factory", "reasoning-gym").DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        raise ValueError(f"no data set {name!r}{f'; did you mean {close[0]}?' if close else ''}")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(config))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name}: {error}") from error


def _plain(value: Any) -> Any:
    """Return what JSON has of a set, or of NumPy's numbers and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write rows to stdout."""
    parser = argparse.ArgumentParser(description="Write rows of a data set of Reasoning Gym.")
    parser.add_argument("dataset", help="its name, e.g. chain_sum")
    parser.add_argument("--size", type=int, default=1000, help="rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, help='other settings of it, e.g. {"min_terms": 3}')
    options = parser.parse_args(arguments)
    try:
        for row in rows(options.dataset, options.size, options.seed, options.config):
            print(json.dumps(row, ensure_ascii=False))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
