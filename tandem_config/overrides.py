"""Parses `--set section.key=value` options; of a list, `section.0.key` is in the first entry and `section` all."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem_config import keys
from tandem_config.problems import ConfigProblem, problem
from tandem_config.sections.reward import CodeReference
from tandem_config.yaml_source import parse_scalar


@dataclass(frozen=True, kw_only=True)
class Override:
    """A parsed `--set` option.

    Attributes:
        field: "" for a whole list (`trackers=[tensorboard]`).
        text: the option as written.
        index: the place in a list, if the option says one.
    """

    section: str
    field: str
    value: Any
    text: str
    index: int | None = None

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.field}" if self.index is None else f"{self.section}[{self.index}].{self.field}"


def parse_overrides(options: Sequence[str]) -> tuple[list[Override], list[ConfigProblem]]:
    """Parse the options. Returns: the valid ones in order, and a problem for each of the others."""
    overrides: list[Override] = []
    problems: list[ConfigProblem] = []
    for text in options:
        parsed = _parse(text)
        if isinstance(parsed, Override):
            overrides.append(parsed)
        else:
            problems.append(parsed)
    return overrides, problems


def _parse(text: str) -> Override | ConfigProblem:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals:
        return _problem(text, key, "", "has no '='", f"write --set {key or 'section.key'}=VALUE")
    section, index, field = _split(key)
    if not field and keys.kinds(key):
        return _override(text, key, None, "", raw)
    if not field:
        return _not_a_key(text, section, raw)
    if section not in keys.sections():
        fields = {key.partition(".")[2] for key in keys.all_keys()}
        guess = keys.did_you_mean("", section) if field not in fields else keys.did_you_mean(section, field)
        guess = keys.of_another(key.split(".")) or guess
        return _problem(text, key, raw, f"there is no section {section!r}", guess)
    if field not in keys.fields_of(section):
        return _problem(text, key, raw, "unknown key", keys.did_you_mean(section, field))
    if index is not None and not keys.kinds(section):
        return _problem(text, key, raw, f"{section} is not a list", f"did you mean {section}.{field}?")
    return _override(text, section, index, field, raw)


def _override(text: str, section: str, index: int | None, field: str, raw: str) -> Override | ConfigProblem:
    try:
        value = _value(f"{section}.{field}", raw) if field else parse_scalar(raw)
        return Override(section=section, index=index, field=field, value=value, text=text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "not valid YAML"
        key = text.partition("=")[0].strip()
        return _problem(text, key, raw, f"the value is not valid YAML: {reason}", "quote it, e.g. --set 'a.b=\"text\"'")


def _split(key: str) -> tuple[str, int | None, str]:
    """Split `section.field`, `section.0.field` or `section[0].field`; the field is "" if there is none."""
    section, _, field = key.partition(".")
    listed = re.fullmatch(r"(\w+)(?:\.|\[)(\d+)\]?\.(.+)", key)
    return (section, None, field) if listed is None else (listed[1], int(listed[2]), listed[3])


def _value(key: str, raw: str) -> Any:
    """Parse a value as YAML; text and paths are taken literally, so that `run.name=2026` and `data.train=a: b` work.

    What takes a list of paths takes one in YAML's brackets too: `data.train=[a.jsonl, {path: b.jsonl, weight: 2}]`.
    """
    is_list = raw.strip().startswith(("[", "{"))
    takes_paths = "path" in keys.entry_fields(key)
    if any(keys.takes(key, kind) for kind in (str, Path, CodeReference)) or (takes_paths and not is_list):
        return _literal(raw)
    return parse_scalar(raw)


def _literal(raw: str) -> str | None:
    text = raw.strip()
    if text in ("null", "~"):
        return None
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _not_a_key(text: str, name: str, raw: str) -> ConfigProblem:
    if name in keys.sections():
        fields = ", ".join(f"{name}.{field}" for field in keys.fields_of(name)[:4])
        return _problem(text, name, raw, "is a section, not a key", f"set one of its keys: {fields}, ...")
    return _problem(text, name, raw, "needs the form section.key", keys.did_you_mean("", name))


def _problem(text: str, key: str, value: str, message: str, suggestion: str) -> ConfigProblem:
    return problem(key or "--set", value, message, suggestion, where=f"--set {text}")
