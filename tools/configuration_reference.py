"""Writes the reference of all settings from the schema, or checks that it is current.

docs/configuration.md is the index. docs/configuration/ has a page for each section, and one for the environment.

python -m tools.configuration_reference write | check
"""

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from servicekit.environment import ServiceEnvironment
from tandem_config.comparing.resuming import MUST_STAY
from tandem_config.keys import fields_of, kinds, note_of, sections
from tandem_config.schema import OffloadSection, Section
from tandem_config.sections.data import DataSource
from tandem_config.sections.reward import CodeReference
from tandem_config.sections.run import EvaluationSet

REPO = Path(__file__).parents[1]
INDEX = REPO / "docs" / "configuration.md"
FOLDER = REPO / "docs" / "configuration"
VARIABLES = FOLDER / "variables.md"
_NAMED_PAGE = re.compile(r"(?<![\w./])docs/([\w-]+\.md)")
_PART = re.compile(r"(?P<begin><!-- (?P<name>\w+): generated -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SETTING = "type | unit | default | what it is | why this default"
_EMPTY: tuple[Any, ...] = (None, "")


def rendered(page: str) -> str:
    """Return the page with the parts between its markers generated. Raises: KeyError: an unknown part."""
    made = parts()
    return _PART.sub(lambda found: f"{found['begin']}{made[found['name']]}\n{found['end']}", page)


def pages() -> dict[Path, str]:
    """Generate every page of the reference: index, environment, and a page for each section."""
    written = {path: rendered(path.read_text(encoding="utf-8")) for path in (INDEX, VARIABLES)}
    return written | {FOLDER / f"{name}.md": _section_page(name, model) for name, model in sections().items()}


def parts() -> dict[str, str]:
    """Generate the Markdown of each part, by the name in its markers."""
    return {"sections": _index(), "environment": _environment(), "resuming": _resuming()}


def _index() -> str:
    """List the sections with their pages."""
    rows = [
        f"| [`{name}`](configuration/{name}.md) | {_settings_of(name, model)} | {_cell(_linked(_text(model), ''))} |"
        for name, model in sections().items()
    ]
    return _table("section | settings | what it is", rows)


def _settings_of(name: str, model: type[Section]) -> int:
    """Count the settings of a section; of a list, those that its kinds have."""
    return len({key for kind in kinds(name).values() for key in kind.model_fields} or model.model_fields)


def _section_page(name: str, model: type[Section]) -> str:
    text = "\n\n".join([f"# {name}", _text(model), _section(name, model), "[All sections](../configuration.md)"])
    return _linked(text, "../") + "\n"


def _linked(text: str, up: str) -> str:
    """Turn the pages that a text names into links, from a page whose way to docs/ is `up`."""
    return _NAMED_PAGE.sub(lambda found: f"[{found[1]}]({up}{found[1]})", text)


def _resuming() -> str:
    """List the settings that a resume must leave as they were, by section."""
    rows = [
        f"| `{section}` | {', '.join(f'`{key}`' for key in fields_of(section) if f'{section}.{key}' in MUST_STAY)} |"
        for section in sections()
    ]
    return _table("section | must be as it was", [row for row in rows if not row.endswith("|  |")])


def _text(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split())


def _section(name: str, model: type[Section]) -> str:
    if kinds(name):
        return _kinds(name)
    rows = [f"| `{key}` | {_setting(field)}" for key, field in model.model_fields.items()]
    entries = [
        _entries(f"{name}.{key}", entry) for key, field in model.model_fields.items() if (entry := _entry_of(field))
    ]
    return "\n\n".join([_table(f"key | {_SETTING}", rows), *entries])


def _entry_of(field: FieldInfo) -> type[Section] | None:
    """Return what the mappings of a setting hold: an evaluation set of the list, or what is offloaded."""
    found = (typing.get_args(field.annotation) or (field.annotation,))[0]
    return next((entry for entry in (EvaluationSet, OffloadSection) if entry is found), None)


def _entries(key: str, model: type[Section]) -> str:
    """Describe the entries of a setting that holds mappings."""
    rows = [
        f"| `{name}` | {type_text(entry)} | {default_text(entry)} | {_cell(entry.description)} |"
        for name, entry in model.model_fields.items()
    ]
    return f"An entry of `{key}`:\n\n{_table('key | type | default | what it is', rows)}"


def _kinds(section: str) -> str:
    """Generate the kinds of a list's entries, and one table of all settings, with the kinds that read each of them."""
    readers: dict[str, list[str]] = {}
    for kind, model in kinds(section).items():
        for key, field in model.model_fields.items():
            if key != "kind":
                readers.setdefault(f"| `{key}` | KINDS | {_setting(field)}", []).append(kind)
    rows = [
        row.replace("KINDS", "all" if len(some) == len(kinds(section)) else ", ".join(some), 1)
        for row, some in sorted(readers.items(), key=lambda item: -len(item[1]))
    ]
    described = [f"| `{kind}` | {_cell(_text(model))} |" for kind, model in kinds(section).items()]
    return "\n\n".join([_table("kind | what it gives", described), _table(f"key | of kind | {_SETTING}", rows)])


def _setting(field: FieldInfo) -> str:
    return (
        f"{type_text(field)} | {note_of(field, 'unit') or '-'} | {default_text(field)} | {_cell(field.description)} "
        f"| {_cell(note_of(field, 'why'))} |"
    )


def _table(heading: str, rows: list[str]) -> str:
    return "\n".join([f"| {heading} |", "|---" * (heading.count("|") + 1) + "|", *rows])


def _environment() -> str:
    rows = [
        f"| `{field.alias}` | {type_text(field)} | {default_text(field)} | {_cell(field.description)} |"
        for field in ServiceEnvironment.model_fields.values()
    ]
    return "\n".join(["| variable | type | default | what it is |", "|---|---|---|---|", *rows])


def type_text(field: FieldInfo) -> str:
    """Describe the type of a setting, in the terms of YAML, with its range.

    >>> from tandem_config.schema import GrpoSection
    >>> type_text(GrpoSection.model_fields["group_size"])
    'integer >= 2 <= 65536'
    """
    return _type(field.annotation, field.metadata)


def _type(annotation: Any, metadata: typing.Sequence[Any]) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        return _type(inner, [*more, *metadata])
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        first, *_ = [member for member in typing.get_args(annotation) if member is not type(None)]
        return f"{_type(first, metadata)}, or null"
    if typing.get_origin(annotation) is list:
        return f"list of {_type(typing.get_args(annotation)[0], [])}s"
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[0] is DataSource:
        return "path, glob, or list"
    if typing.get_origin(annotation) in (tuple, list):
        return f"list of {_plural(_type(typing.get_args(annotation)[0], []))}"
    if typing.get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    names = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "path", CodeReference: "string"}
    return " ".join([names[annotation], *_bounds(metadata)])


def _plural(text: str) -> str:
    """Put a type's name in the plural, before its bounds."""
    name, _, bounds = text.partition(" ")
    return f"{name}s {bounds}".strip()


def _bounds(metadata: typing.Sequence[Any]) -> list[str]:
    found = []
    for entry in metadata:
        inner = entry.metadata if isinstance(entry, FieldInfo) else [entry]
        for item in inner:
            limits = [(sign, getattr(item, name)) for name, sign in _BOUNDS.items() if hasattr(item, name)]
            found += [f"{sign} {limit}" if isinstance(limit, int) else f"{sign} {limit:g}" for sign, limit in limits]
    return found


def default_text(field: FieldInfo) -> str:
    """Describe the default, or that there is none."""
    if field.is_required():
        return "**required**"
    if field.default_factory is not None:
        return "empty"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value in _EMPTY:
        return "null" if value is None else "unset"
    if value == ():
        return "`[]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Write or check the pages. Returns: 0, or 1 if a page is out of date. Raises: SystemExit: wrong usage."""
    if arguments not in (["write"], ["check"]):
        raise SystemExit(__doc__)
    wanted = pages()
    extra = set(FOLDER.glob("*.md")) - wanted.keys()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if arguments == ["write"]:
        for path in stale:
            path.write_text(wanted[path], encoding="utf-8")
        for path in extra:
            path.unlink()
        return 0
    for path in sorted([*stale, *extra]):
        print(f"{path.relative_to(REPO)} is not what the settings say: python -m tools.configuration_reference write")
    return 1 if stale or extra else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
