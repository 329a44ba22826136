"""Parses the parallel sizes of `tandem plan`, e.g. "tp=4,pp=8,ep=16", and chooses those that are not given."""

import difflib
import math
from dataclasses import replace

from launcher.plan.limits import check_ranks
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from weightsync.layouts.layout import Parallel
from weightsync.layouts.stages import chunks_of
from weightsync.model.spec import ModelSpec

TRAINER_KEYS = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "vpp": "virtual_pipeline",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
    "embedding": "embedding_counts",
    "loss": "loss_counts",
}
ROLLOUT_KEYS = {"tp": "tensor", "ep": "expert"}
_SWITCHES = ("embedding", "loss")
_DIGITS = 7
_SPLIT = ("first", "last", *_SWITCHES)


def trainer_sizes(text: str, spec: ModelSpec) -> tuple[Parallel, list[str]]:
    """Parse the trainer's sizes.

    dp, if not given, is the least that has room for the expert ranks. Layers that do not divide by the stages are
    spread in one of megatron-core's ways, unless the text gives one.

    Returns: the sizes, and a note on every size that was chosen.
    Raises: ConfigErrors: an unknown key or a bad value, with a suggestion.
    """
    sizes = _parse("--trainer", text, TRAINER_KEYS)
    parallel = Parallel(**{TRAINER_KEYS[key]: value for key, value in sizes.items()})  # type: ignore[arg-type]
    notes = []
    check_ranks("--trainer", text, parallel)
    if "dp" not in sizes:
        parallel = replace(parallel, data=_data_size(parallel))
        check_ranks("--trainer", text, parallel)
        if parallel.data > 1:
            notes.append(f"dp={parallel.data}, the least that has room for the expert ranks")
    if not any(key in sizes for key in _SPLIT):
        parallel, note = _split_layers(spec.num_layers, parallel)
        notes += [note] if note else []
    return parallel, notes


def rollout_sizes(text: str) -> Parallel:
    """Parse a replica's sizes. Raises: ConfigErrors: an unknown key or a bad value, with a suggestion."""
    sizes = _parse("--rollout", text, ROLLOUT_KEYS)
    parallel = Parallel(tensor=sizes.get("tp", 1), expert=sizes.get("ep", 1))
    check_ranks("--rollout", text, parallel)
    return parallel


def _parse(option: str, text: str, keys: dict[str, str]) -> dict[str, int]:
    problems, sizes = [], {}
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in keys:
            problems.append(_unknown_key(option, item, key, keys))
        elif key in sizes:
            problems.append(problem(option, item, f"{key} is given twice"))
        elif not value.isdecimal() or len(value) > _DIGITS or not _allowed(key, int(value)):
            wanted = "0 or 1" if key in _SWITCHES else f"a whole number, at least 1, of at most {_DIGITS} digits"
            problems.append(problem(option, item, f"{key} must be {wanted}"))
        else:
            sizes[key] = int(value)
    if problems:
        raise ConfigErrors(problems)
    return sizes


def _allowed(key: str, value: int) -> bool:
    return value <= 1 if key in _SWITCHES else value >= 1


def _unknown_key(option: str, item: str, key: str, keys: dict[str, str]) -> ConfigProblem:
    if key in TRAINER_KEYS:
        message = f"a rollout has no {key}: its ranks are tensor-parallel ranks, of which ep groups divide the experts"
        return problem(option, item, message, f"known: {', '.join(keys)}")
    close = difflib.get_close_matches(key, keys, 1, 0.5)
    by_name = {name.split("_")[0]: short for short, name in reversed(keys.items())}
    close = close or [by_name[name] for name in difflib.get_close_matches(key, by_name, 1, 0.5)]
    hint = f"did you mean {close[0]}=? " if close else ""
    return problem(option, item, f"unknown size {key!r}", f"{hint}known: {', '.join(keys)}")


def _data_size(parallel: Parallel) -> int:
    """Return the least dp at which expert x expert tensor divides the ranks of a stage."""
    sharers, ranks = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
    return sharers // math.gcd(sharers, ranks)


def _split_layers(num_layers: int, parallel: Parallel) -> tuple[Parallel, str]:
    """Spread the layers in the first of megatron-core's ways that fits. Returns: sizes, and a note unless even."""
    middle = parallel.pipeline - 2
    most = -(-num_layers // parallel.pipeline)
    rest = num_layers - most * middle
    ways = {
        "": {},
        "embedding=1,loss=1": {"embedding_counts": True, "loss_counts": True},
        "embedding=1": {"embedding_counts": True},
        "loss=1": {"loss_counts": True},
        f"first={rest // 2},last={rest - rest // 2}": {
            "first_stage_layers": rest // 2,
            "last_stage_layers": rest - rest // 2,
        },
    }
    for text, changes in ways.items():
        changed = replace(parallel, **changes)  # type: ignore[arg-type]
        if _fits(num_layers, changed):
            return changed, f"{text}: {num_layers} layers do not divide by pp={parallel.pipeline}" if text else ""
    return parallel, ""  # making the layout fails, and names the problem


def _fits(num_layers: int, parallel: Parallel) -> bool:
    try:
        return all(chunk.num_layers > 0 for chunk in chunks_of(num_layers, parallel))
    except ConfigError:
        return False
