"""Translates pydantic's validation errors: key, value, what is wrong, what to write instead."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic_core import ErrorDetails

from tandem_config import keys
from tandem_config.problems import ConfigProblem, problem
from tandem_config.yaml_source import node_of, text_at

_BOUND = {
    "greater_than": ("gt", "must be greater than {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than": ("lt", "must be less than {}"),
    "less_than_equal": ("le", "must be at most {}"),
}
_TYPE = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "path_type": "must be a path",
    "is_instance_of": "must be a path",
    "model_type": "must be a section with keys",
    "model_attributes_type": "must be a section with keys",
    "union_tag_not_found": "must be a section with keys",
    "dict_type": "must be a mapping",
    "invalid-json-value": "must be text, a number, true, false, null, or a list or mapping of these",
}
# Errors of values that must be texts.
_OF_TEXTS = ("string_type", "path_type", "is_instance_of")
# `{kind:exact_match}`.
_UNSPACED = re.compile(r"\w+:\S+")
# Ranges that are explained, not just stated.
_REASONS = {
    ("grpo.group_size", "greater_than_equal"): (
        "must be at least 2: a group of one is its own mean, so every advantage would be 0",
        "16 is the default",
    ),
    ("schedule.max_staleness", "greater_than_equal"): (
        "must be at least 1: with 0 no group would be under way beside the step",
        "set schedule.kind: sync, which trains on samples of the present policy only",
    ),
}
# Values that have another meaning in other trainers.
_VALUES = {
    ("grpo.aggregation", "seq-mean-token-sum-norm"): (
        "is not supported: in verl it is the sum over all tokens / max length, not divided by the number of sequences",
        "use dr-grpo, which also divides by the number of sequences, as TRL's dr_grpo; mind trainer.clip_grad's scale",
    ),
    **{
        ("grpo.objective", name): (
            "is not a term of the loss of its own, but objective: grpo with other settings",
            f"set grpo.preset: {name}, which sets them",
        )
        for name in ("dapo", "dr_grpo", "decoupled")
    },
    **{
        ("grpo.objective", name): ("is another name of objective: grpo, PPO's clipped ratio", "use grpo")
        for name in ("vanilla", "ppo", "ppo_clip")
    },
}


def translate(detail: ErrorDetails, origins: Mapping[str, str], root: yaml.Node | None = None) -> ConfigProblem:
    """Translate one pydantic error into a problem.

    Args:
        origins: where a value was given, by dotted key.
        root: the file's, for the texts of values.
    """
    key = _key(detail, origins)
    written = _written(detail, place_of(key, origins), root)
    if written:
        detail["input"] = _Written(written)
    given = detail["type"] != "missing" and not detail.get("ctx", {}).get("secret")
    value = _shown(_kind(detail) if key.endswith(".kind") and _kind(detail) else detail["input"]) if given else ""
    within = len(detail["loc"]) > 2 and bool(keys.entry_fields(key))
    message, suggestion = _explain_within(key, detail) if within else _explain(key, detail)
    return problem(key, value, message, suggestion, where=place_of(key, origins))


class _Written:
    """A value that YAML does not read as the text that the file has: `007`, `on`, `2024-01-15`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _written(detail: ErrorDetails, place: str, root: yaml.Node | None) -> str:
    """Return how the file or the option has a value that is no text to YAML; "": it is one, or null, or unknown."""
    if detail["type"] not in _OF_TEXTS or isinstance(detail["input"], (str, Mapping, list, tuple, type(None))):
        return ""
    path = detail["loc"]
    if place.startswith("--set "):
        option, _, raw = place.removeprefix("--set ").partition("=")
        root, path = node_of(raw), path[len(option.split(".")) :]
    return text_at(root, path)


def place_of(key: str, origins: Mapping[str, str]) -> str:
    """Return where a key was given, or else its entry of a list, or its section; "" if none of them was."""
    parents = (key, key.rpartition(".")[0], keys.split(key)[0])
    return next((origins[parent] for parent in parents if parent in origins), "")


def _key(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Return the dotted key that an error is about; `section[1].key` in a list."""
    section, *inner = (str(part) for part in detail["loc"])
    if not keys.kinds(section) or not inner:
        return ".".join([section, *inner[:1]])
    entry = f"{section}[{inner[0]}]" if f"{section}[0]" in origins and f"{section}[1]" in origins else section
    field = "kind" if detail["type"] == "union_tag_invalid" else "".join(inner[2:3])
    return f"{entry}.{field}" if field else entry


def _kind(detail: ErrorDetails) -> str:
    """Return the kind of the list's entry that an error is about; "" if it is about something else."""
    section, *inner = (str(part) for part in detail["loc"])
    if detail["type"] == "union_tag_invalid":
        return str(detail.get("ctx", {}).get("tag", ""))
    return inner[1] if keys.kinds(section) and len(inner) > 1 else ""


def _explain(key: str, detail: ErrorDetails) -> tuple[str, str]:
    kind, context = detail["type"], detail.get("ctx", {})
    section, field = keys.split(key)
    if kind == "setting":
        return context["message"], context["suggestion"]
    if kind == "extra_forbidden":
        return _unknown(section, field, _kind(detail), detail["input"])
    if kind == "union_tag_invalid" or (kind == "union_tag_not_found" and isinstance(detail["input"], Mapping)):
        return _explain_kind(section, detail)
    if kind == "missing":
        return "is missing and has no default", _how_to_add(key)
    if (key, kind) in _REASONS:
        return _REASONS[(key, kind)]
    if kind in _BOUND:
        name, text = _BOUND[kind]
        return text.format(context[name]), keys.description(key)
    if kind == "literal_error" and (key, str(detail["input"])) in _VALUES:
        return _VALUES[(key, str(detail["input"]))]
    if kind == "literal_error":
        return f"must be one of {context['expected']}", _closest(detail["input"], context["expected"])
    if kind == "string_pattern_mismatch":
        return "must be at most 63 letters, digits, '.', '_' and '-', and start with a letter or digit", ""
    return _TYPE.get(kind, detail["msg"]), _type_hint(key, kind, detail["input"])


def _explain_kind(section: str, detail: ErrorDetails) -> tuple[str, str]:
    context = detail.get("ctx", {})
    if detail["type"] == "union_tag_not_found":
        if any(_UNSPACED.fullmatch(str(name)) for name in detail["input"]):
            return _unspaced(next(str(name) for name in detail["input"] if _UNSPACED.fullmatch(str(name))))
        return "has no kind", f"add `kind:` with one of {', '.join(keys.kinds(section))}"
    return f"must be one of {context['expected_tags']}", _closest(context["tag"], context["expected_tags"])


def _explain_within(key: str, detail: ErrorDetails) -> tuple[str, str]:
    """Explain an error inside a list or mapping: `entry 2: weight must be greater than 0`."""
    *places, field = detail["loc"][2:]
    entry = "".join(f"entry {place + 1}: " for place in places if isinstance(place, int))
    name = f"entry {field + 1}" if isinstance(field, int) else str(field)
    if detail["type"] == "extra_forbidden" and _UNSPACED.fullmatch(name):
        return _unspaced(name)
    if detail["type"] == "extra_forbidden":
        known = list(keys.entry_fields(key))
        close = difflib.get_close_matches(name, known, 1)
        return f"{entry}unknown key {name}", f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    if detail["type"] == "missing":
        return f"{entry}{name} is missing", keys.entry_fields(key).get(name, "")
    message, suggestion = _explain(key, detail)
    is_written = isinstance(detail["input"], _Written)
    return f"{entry}{name} {message}", suggestion if is_written else keys.entry_fields(key).get(name, suggestion)


def _unknown(section: str, field: str, kind: str, given: Any) -> tuple[str, str]:
    if not field:
        return "unknown section", keys.of_another_section(section, given) or keys.did_you_mean("", section)
    if _UNSPACED.fullmatch(field):
        return _unspaced(field)
    readers = [name for name, model in keys.kinds(section).items() if field in model.model_fields]
    if readers:
        return (
            f"does nothing with {section}.kind: {kind}",
            f"leave it out; it is a setting of kind: {' or '.join(readers)}",
        )
    return "unknown key", keys.did_you_mean(section, field)


def _unspaced(name: str) -> tuple[str, str]:
    key, _, value = name.partition(":")
    return f"YAML reads {name!r} as a key without a value", f"put a space after the colon: {key}: {value}"


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _how_to_add(key: str) -> str:
    section, field = keys.split(key)
    if not field:
        required = [name for name, info in keys.sections()[key].model_fields.items() if info.is_required()]
        return f"add a section `{key}:` with {', '.join(f'`{name}:`' for name in required)}"
    return f"add `{field}:` under `{section}:` - {keys.description(key)}"


def _closest(value: Any, expected: str) -> str:
    options = [option.strip().strip("'") for option in expected.replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(str(value).replace("-", "_"), options, 1, 0.5)
    close = close or difflib.get_close_matches(str(value), options, 1, 0.5)
    return f"did you mean {close[0]}?" if close else ""


def _type_hint(key: str, kind: str, value: Any) -> str:
    if kind in ("model_type", "model_attributes_type", "union_tag_not_found"):
        section, _ = keys.split(key)
        return f"write `{section}:` and its keys indented below: {', '.join(keys.fields_of(section)[:3])}, ..."
    if isinstance(value, _Written) or (kind == "string_type" and isinstance(value, (int, float))):
        return f'quote it: "{_shown(value)}"' + ("" if kind == "string_type" else f"; {keys.description(key)}")
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and abs(value) < 1e15:
        return f"write {round(value)}"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type") and value:
        return "remove the quotes" if _reads_as_number(value) else keys.description(key)
    return keys.description(key)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
