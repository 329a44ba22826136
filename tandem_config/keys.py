"""Which keys exist, what type each has, and which one a misspelt key may have meant."""

import difflib
import typing
from pathlib import Path

from tandem_config.schema import RunConfig, Section

# A typo of one or two letters in a word of six scores about 0.7; below 0.6 suggestions are noise.
_CLOSE_ENOUGH = 0.6


def sections() -> dict[str, type[Section]]:
    """Section name -> its model, in the order of the schema."""
    return {name: typing.cast(type[Section], field.annotation) for name, field in RunConfig.model_fields.items()}


def fields_of(section: str) -> list[str]:
    """The keys of a section; empty if there is no such section."""
    model = sections().get(section)
    return [] if model is None else list(model.model_fields)


def all_keys() -> list[str]:
    """Every dotted key, e.g. `trainer.learning_rate`."""
    return [f"{section}.{field}" for section in sections() for field in fields_of(section)]


def description(key: str) -> str:
    """The schema's sentence about a dotted key; "" if there is no such key."""
    section, _, field = key.partition(".")
    info = sections()[section].model_fields.get(field) if section in sections() else None
    return "" if info is None or info.description is None else info.description


def takes(key: str, kind: type) -> bool:
    """Whether a dotted key's type is, or may be, `kind` (str, Path, int, ...)."""
    section, _, field = key.partition(".")
    model = sections().get(section)
    if model is None or field not in model.model_fields:
        return False
    annotation = model.model_fields[field].annotation
    if typing.get_origin(annotation) is typing.Literal:
        return kind is str
    return annotation is kind or kind in typing.get_args(annotation)


def path_keys() -> list[str]:
    """Every dotted key that names a file or folder."""
    return [key for key in all_keys() if takes(key, Path)]


def did_you_mean(section: str, field: str) -> str:
    """The suggestion for an unknown key: same section first, then the same or a close name anywhere.

    >>> did_you_mean("grpo", "group_sise")
    'did you mean grpo.group_size?'
    >>> did_you_mean("grpo", "learning_rate")
    'did you mean trainer.learning_rate?'
    >>> did_you_mean("", "trainr")
    'did you mean trainer?'
    """
    for candidates in _candidate_lists(section, field):
        if candidates:
            return f"did you mean {' or '.join(candidates)}?"
    valid = fields_of(section) if section else list(sections())
    return f"known keys here: {', '.join(valid)}" if valid else ""


def _candidate_lists(section: str, field: str) -> typing.Iterator[list[str]]:
    if section:
        yield [f"{section}.{name}" for name in difflib.get_close_matches(field, fields_of(section), 1, 0.75)]
    else:
        yield difflib.get_close_matches(field, list(sections()), 1, _CLOSE_ENOUGH)
    by_name = {key.partition(".")[2]: key for key in all_keys()}
    yield [key for key in all_keys() if key.partition(".")[2] == field]
    if section:
        yield [f"{section}.{name}" for name in difflib.get_close_matches(field, fields_of(section), 1, _CLOSE_ENOUGH)]
    yield [by_name[name] for name in difflib.get_close_matches(field, list(by_name), 1, _CLOSE_ENOUGH)]
