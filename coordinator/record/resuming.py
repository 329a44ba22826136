"""Compares a resumed run with its checkpoint: the order of its prompts, which must be the same; rewards; evaluations.

A position in the data is meaningless in another order. Settings are compared by tandem_config/comparing/resuming.py;
other code of a reward or environment is reported, because the scores before and after it do not compare. An evaluation
set that has other prompts, or is sampled or scored otherwise, begins anew: its baseline, its latest figures, the best
policy by it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from coordinator.data.scan import Scan
from coordinator.record.state import BestPolicy, DataOrder, RunState, SourceOrder
from coordinator.workers.own_code import source_file
from tandem_clients.flow import Prompt
from tandem_clients.formatting import PromptFormat
from tandem_config.comparing.resuming import MAY_CHANGE, difference
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_config.sections.reward import CodeReference, FunctionReward, split_reference
from tandem_config.sections.rewards.base import RewardSection
from tandem_files.digests import file_digest, text_digest

# Longer values of settings are compared and shown by their digests, of which messages show the beginning.
_SHOWN_CHARS, _DIGEST_CHARS = 80, 12
# What a run with rollout.skip_special_tokens: false, the default, has besides its rewards' own.
_KEPT = {"completions": "with special tokens, but those that end or pad them (rollout.skip_special_tokens: true: none)"}
# How rewards that compare with an answer read it, since the release that does so otherwise than the one before it.
_READING = "marked answers first, numbers as the file has them (docs/rewards.md, Where the answer is)"
_READS_ANSWERS = {"exact_match", "regex", "math_verify"}
# In place of a setting that prompts do not depend on.
UNUSED = "unused"
# Settings that change no score.
_NO_SCORE = {"trial"}
_ENVIRONMENT = "environment: "
# What is known of the prompts of an evaluation set: their contents, or in the checkpoint of an older release the names.
_PROMPTS, _BY_CONTENT = "prompts", {"files", "num_prompts"}


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
        sources=[
            SourceOrder(weight=scan.source.weight, num_prompts=scan.num_used, digest=scan.digest) for scan in scans
        ],
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
    return found + _differences(old.settings, order.settings, absent=UNUSED)


def reward_facts(config: RunConfig) -> dict[str, str]:
    """Return what the scores of a configuration depend on: settings that are not the default, and own code's digests.

    Raises: OSError: a file of own code cannot be read.
    """
    facts = {
        f"reward {section.label}: {name}": value
        for section in config.reward
        for name, value in (
            *_settings(section),
            *_code([section.function] if isinstance(section, FunctionReward) else ()),
        )
    }
    if (answers := config.environment) is not None:
        code = _code(answers.tools if answers.function is None else [answers.function])
        facts |= {f"{_ENVIRONMENT}{name}": value for name, value in code}
    # Checkpoints of older releases lack it: they removed all.
    return facts if config.rollout.skip_special_tokens else facts | _KEPT


def sampled_by(model: str, facts: Mapping[str, str]) -> str:
    """Return what completions depend on besides prompts and order, for a ledger: the model, an environment's code.

    Args:
        model: its fingerprint.
        facts: `reward_facts` of the run.
    """
    return " ".join([model, *(value for name, value in facts.items() if name.startswith(_ENVIRONMENT))])


def reward_warning(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the warning of rewards that are not the checkpoint's; "": they are, or the checkpoint does not say.

    Args:
        old: `reward_facts` of the checkpoint; {} of a new run, and of an older release.
        new: those of the run.
    """
    different = _differences(old, new)
    if not old or not different:
        return ""
    return f"{'; '.join(different)}: the scores before and after this resume do not compare"


def _differences(old: Mapping[str, str], new: Mapping[str, str], *, absent: str = "unset") -> list[str]:
    return [
        difference(key, before, now)
        for key in sorted(old.keys() | new.keys())
        if (before := old.get(key, absent)) != (now := new.get(key, absent))
    ]


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """What a resume begins anew.

    Attributes:
        messages: for the run's user.
        former_best: the best policy of before, which is compared with no later one.
    """

    messages: Sequence[str] = ()
    former_best: BestPolicy | None = None


def set_facts(config: RunConfig, prompts: Mapping[str, Iterable[Prompt]]) -> dict[str, dict[str, str]]:
    """Return what the figures of each evaluation set depend on, besides its reward.

    Args:
        prompts: by the sets' names.
    Raises: OSError, ValueError: as reading the prompts.
    """
    return {
        chosen.name: dict(_settings_of_set(config, chosen))
        | {_PROMPTS: _content_of(islice(prompts[chosen.name], chosen.num_prompts))}
        for chosen in config.evaluation_sets()
    }


def begin_sets_anew(
    state: RunState, config: RunConfig, facts: Mapping[str, Mapping[str, str]], before: RunConfig | None
) -> Renewal:
    """Forget in a checkpoint's state what later evaluations do not compare with; record what they depend on now.

    Args:
        facts: `set_facts` of the run.
        before: the run's configuration so far, for the checkpoint of a release that has not recorded such facts.
    """
    old: Mapping[str, Mapping[str, str]] | None = state.sets
    if old is None and before is not None:
        old = {chosen.name: dict(_settings_of_set(before, chosen)) for chosen in before.evaluation_sets()}
    was_best, messages = state.best, list(_unknown(state, facts))
    why = {} if old is None else _changed_sets(state, config, old, facts)
    for name, text in why.items():
        state.forget_set(name)
        if name in facts:
            state.renewed[name] = state.iteration
            text += f": its baseline is measured with the policy after iteration {state.iteration}"
        messages.append(f"evaluation set {name} {text}")
    asked = config.evaluation.best
    if state.best is not None and asked is not None and asked != state.best.metric:
        state.best = None
        messages.append(f"evaluation.best is {asked} now")
    former = was_best if state.best is None else None
    if former is not None:
        kept = "" if former.iteration == 0 else "; its checkpoint is kept until you remove its folder"
        place = f"after iteration {former.iteration}" if former.iteration else "before the training"
        messages.append(
            f"the best policy so far, {place} ({former.metric} {former.value:.3f}), is compared with no later one{kept}"
        )
    state.sets = {name: dict(texts) for name, texts in facts.items()}
    return Renewal(messages=messages, former_best=former)


def _changed_sets(
    state: RunState, config: RunConfig, old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return why sets begin anew, or end, by the set."""
    marked = [section for section in config.reward if section.accuracy]
    reward = f"reward {(marked or config.reward)[0].label}: "
    saved, now = (
        {
            key: text
            for key, text in facts.items()
            if key.startswith((reward, _ENVIRONMENT)) and f"reward.{key.removeprefix(reward)}" not in MAY_CHANGE
        }
        for facts in (state.rewards, reward_facts(config) if state.rewards else {})
    )
    scored = _differences(saved, now)
    found = {name: "is not evaluated any more" for name in old if name not in new}
    for name, facts in new.items():
        if name not in old:
            found[name] = "is new"
            continue
        # The same prompts in files of another name are the same set.
        by_content = _BY_CONTENT if _PROMPTS in old[name] else {_PROMPTS}
        texts = [{key: text for key, text in known.items() if key not in by_content} for known in (old[name], facts)]
        if different := [*_differences(*texts), *scored]:
            found[name] = f"has changed ({'; '.join(different)})"
    return found


def _unknown(state: RunState, facts: Mapping[str, object]) -> Iterator[str]:
    """Yield what cannot be compared with the checkpoint of an older release."""
    if state.sets is None and facts and (state.baseline or state.initial_accuracy is not None):
        yield (
            "the checkpoint does not say which prompts its evaluation sets had, as an older release wrote it: if their "
            "files have changed since, figures before and after this resume do not compare"
        )


def _settings_of_set(config: RunConfig, chosen: EvaluationSet) -> Iterator[tuple[str, str]]:
    for key in ("samples", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        yield key, str(getattr(chosen, key))
    if chosen.samples > 1:  # pass@k is measured
        yield "evaluation.right_from", str(config.evaluation.right_from)
    own = chosen.max_new_tokens
    yield "max_new_tokens", str(config.grpo.max_new_tokens if own is None else own)
    yield "num_prompts", str(chosen.num_prompts)
    yield "files", ", ".join(source.path.name for source in chosen.data)


def _content_of(prompts: Iterable[Prompt]) -> str:
    """Return the number of prompts and a digest of all that they are scored by, in any order."""
    rows = sorted(
        text_digest(json.dumps([prompt.text, list(prompt.token_ids), prompt.answer, prompt.columns], sort_keys=True))
        for prompt in prompts
    )
    return f"{len(rows)} ({text_digest(' '.join(rows))[:_DIGEST_CHARS]})"


def _settings(section: RewardSection) -> Iterator[tuple[str, str]]:
    kind = section.model_dump(include={"kind"})
    if kind["kind"] in _READS_ANSWERS:
        yield "reading of answers", _READING
    for name, value in (kind | section.model_dump(mode="json", exclude=_NO_SCORE, exclude_defaults=True)).items():
        text = json.dumps(value, sort_keys=True)
        yield name, text if len(text) <= _SHOWN_CHARS else text_digest(text)[:_DIGEST_CHARS]


def _code(references: Iterable[CodeReference]) -> Iterator[tuple[str, str]]:
    for place in dict.fromkeys(split_reference(reference)[0] for reference in references):
        file = source_file(place)
        if file is not None:
            yield f"code of {place}", file_digest(file)["xxh3_128"][:_DIGEST_CHARS]


def _columns(scans: Sequence[Scan]) -> dict[str, str]:
    """Return the columns of prompts and answers, of each file in order where files differ."""
    keys = [file.keys for scan in scans for file in scan.source.files]
    by_setting: dict[str, list[str | None]] = {
        "data.prompt_key": [of_file.prompt for of_file in keys],
        "data.answer_key": [of_file.answer for of_file in keys],
    }
    if any(of_file.system is not None for of_file in keys):  # older checkpoints do not name it
        by_setting["data.system_key"] = [of_file.system for of_file in keys]
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
