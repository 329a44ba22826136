"""In what the runs to compare differ: settings by key; rewards by their names, however they are listed; own code."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.view.compare.runs import RunCurves

# Settings that differ between any two runs.
_OWN_SETTINGS = frozenset({"run.name", "run.output_dir"})
NO_VALUE = "-"
# What the table calls the sum of the rewards.
REWARDS = "rewards"


def differing(runs: Sequence[RunCurves]) -> dict[str, list[str]]:
    """Return the settings, and the files of own code, in which the runs differ: by key, the value of each run."""
    keys = sorted({key for run in runs for key in run.settings} - _OWN_SETTINGS)
    values = {key: [_text(run.settings, key) for run in runs] for key in keys}
    return _different(values | _differing_rewards(runs))


def _differing_rewards(runs: Sequence[RunCurves]) -> dict[str, list[str]]:
    """Return in what the rewards of the runs differ, reward by reward.

    What the score is made of is one entry; below it are the settings and files of rewards of one name in several runs.
    """
    values = {REWARDS: [sum_of(run.rewards) for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run.rewards):
        of_runs = [run.rewards.get(name) for run in runs]
        having = [settings for settings in of_runs if settings is not None]
        if len(having) < 2:
            continue  # the sum says that one run has it
        kinds = {_text(settings, "kind") for settings in having}
        keys = ["kind"] if len(kinds) > 1 else sorted({key for settings in having for key in settings} - {"weight"})
        differ = _different({key: [_text(settings, key) for settings in having] for key in keys})
        values |= {f"reward {name}: {key}": [_text(settings or {}, key) for settings in of_runs] for key in differ}
        values |= _differing_code(runs, f"reward {name}")
    values |= _differing_code(runs, "environment")
    return _different(values)


def sum_of(rewards: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the sum that a completion's reward is.

    >>> sum_of({"score": {"weight": 1.0}, "short": {"weight": 0.5}})
    'score + 0.5 short'
    """
    weights = {name: float(settings.get("weight", 1.0)) for name, settings in rewards.items()}
    return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items()) or NO_VALUE


def _differing_code(runs: Sequence[RunCurves], owner: str) -> dict[str, list[str]]:
    """Return the digests of the files of a reward or environment; nothing if a run has not recorded its rewards."""
    found = [run.code.get(owner, {}) for run in runs if run.code is not None]
    names = dict.fromkeys(name for files in found for name in files) if len(found) == len(runs) else ()
    return {f"{owner}: {name}": [files.get(name, NO_VALUE) for files in found] for name in names}


def _different(values: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def _text(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return NO_VALUE
    value = settings[key]
    return value if isinstance(value, str) else json.dumps(value)
