"""Compares a resumed run with its checkpoint: the order of its prompts, which must be the same, and its rewards.

A position in the data is meaningless in another order. Settings are compared by tandem_config/comparing/resuming.py;
other code of a reward is reported, since the scores before and after it do not compare.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from coordinator.data.formatting import PromptFormat
from coordinator.data.scan import Scan
from coordinator.learn.rewards.source import source_file
from coordinator.record.state import DataOrder, RunState, SourceOrder
from tandem_config.comparing.resuming import difference
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import FunctionReward, split_reference
from tandem_config.sections.rewards.base import RewardSection
from tandem_files.digests import file_digest, text_digest

# Longer values of settings are compared and shown by their digests, of which messages show the beginning.
_SHOWN_CHARS, _DIGEST_CHARS = 80, 12
# How rewards read texts, since the release that reads them otherwise than the one before it.
_READING = "marked answers first, numbers as the file has them, special tokens kept (CHANGELOG, docs/rewards.md)"
_READS_TEXTS = {"exact_match", "regex", "format", "math_verify", "function", "remote", "judge"}
# Settings that change no score.
_NO_SCORE = {"trial"}


def order_of(config: RunConfig, scans: Sequence[Scan], formats: PromptFormat) -> DataOrder:
    """Return what the order of a configuration's prompts depends on.

    Args:
        scans: of the sources of data.train.
        formats: which rendered and tokenized them.
    """
    settings = {"tokenizer": formats.tokenizer_digest()}
    for key in ("prompt_as", "tools_key"):
        settings[f"data.{key}"] = str(getattr(config.data, key))
    if any(scan.rendered for scan in scans):
        settings |= formats.identity()
    return DataOrder(
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        sources=[_source(scan) for scan in scans],
        settings=settings | _columns(scans),
    )


def order_differences(saved: RunState, order: DataOrder) -> list[str]:
    """List the differences between a checkpoint and a run, e.g. `run.seed: 0 in the checkpoint, 1 in the run`."""
    old = saved.order
    if old is None:
        return []
    found = [
        difference(key, before, now)
        for key, before, now in (
            ("run.seed", old.seed, order.seed),
            ("data.shuffle", old.shuffle, order.shuffle),
            ("sources of data.train", len(old.sources), len(order.sources)),
        )
        if before != now
    ]
    if len(old.sources) == len(order.sources):
        found += _source_differences(old.sources, order.sources)
    for key in sorted(old.settings.keys() | order.settings.keys()):
        before, now = old.settings.get(key, "unused"), order.settings.get(key, "unused")
        if before != now:
            found.append(difference(key, before, now))
    return found


def reward_facts(config: RunConfig) -> dict[str, str]:
    """Return what the scores of a configuration depend on: settings that are not the default, and own code's digests.

    Raises: OSError: a file of own code cannot be read.
    """
    return {
        f"reward {section.label}: {name}": value
        for section in config.reward
        for name, value in (*_settings(section), *_code(section))
    }


def reward_warning(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the warning of rewards that are not the checkpoint's; "": they are, or the checkpoint does not say.

    Args:
        old: `reward_facts` of the checkpoint; {} of a new run, and of an older release.
        new: those of the run.
    """
    different = [
        difference(key, old.get(key, "unset"), new.get(key, "unset"))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if not old or not different:
        return ""
    return f"{'; '.join(different)}: the scores before and after this resume do not compare"


def _settings(section: RewardSection) -> Iterator[tuple[str, str]]:
    kind = section.model_dump(include={"kind"})
    if kind["kind"] in _READS_TEXTS:
        yield "reading of texts", _READING
    for name, value in (kind | section.model_dump(mode="json", exclude=_NO_SCORE, exclude_defaults=True)).items():
        text = json.dumps(value, sort_keys=True)
        yield name, text if len(text) <= _SHOWN_CHARS else text_digest(text)[:_DIGEST_CHARS]


def _code(section: RewardSection) -> Iterator[tuple[str, str]]:
    if isinstance(section, FunctionReward):
        place, _ = split_reference(section.function)
        file = source_file(place)
        if file is not None:
            yield f"code of {place}", file_digest(file)["xxh3_128"][:_DIGEST_CHARS]


def _source(scan: Scan) -> SourceOrder:
    return SourceOrder(weight=scan.source.weight, num_prompts=scan.num_used, digest=scan.digest)


def _columns(scans: Sequence[Scan]) -> dict[str, str]:
    """Return the columns of prompts and answers, of each file in order where files differ."""
    keys = [file.keys for scan in scans for file in scan.source.files]
    by_setting: dict[str, list[str | None]] = {
        "data.prompt_key": [of_file.prompt for of_file in keys],
        "data.answer_key": [of_file.answer for of_file in keys],
    }
    return {
        setting: json.dumps(columns[0] if len(set(columns)) == 1 else columns)
        for setting, columns in by_setting.items()
    }


def _source_differences(old: Sequence[SourceOrder], new: Sequence[SourceOrder]) -> Iterator[str]:
    for place, (before, now) in enumerate(zip(old, new, strict=True), start=1):
        name = "data.train" if len(new) == 1 else f"data.train, source {place}"
        if before.weight != now.weight:
            yield difference(f"{name}, weight", before.weight, now.weight)
        if before.digest != now.digest or before.num_prompts != now.num_prompts:
            yield (
                f"{name}: other rows than those of the checkpoint ({before.num_prompts} usable ones in the checkpoint, "
                f"{now.num_prompts} in the run{'' if before.digest == now.digest else '; the files have other bytes'})"
            )
