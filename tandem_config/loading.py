"""Turns a YAML file and `--set` options into a `RunConfig`, or reports everything that is wrong with them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tandem_config import keys, paths
from tandem_config.cross_checks import cross_check
from tandem_config.messages import place_of, translate
from tandem_config.overrides import Override, parse_overrides
from tandem_config.problems import ConfigErrors, ConfigProblem, errors_only, problem
from tandem_config.schema import LISTED, RunConfig
from tandem_config.sections.grpo import preset_values
from tandem_config.yaml_source import YamlSource, read_yaml

# Results must not go beside the file by default: an example's file can lie in a read-only folder.
_RELATIVE_TO_WORKING_DIRECTORY = frozenset({"run.output_dir"})
_PLACEHOLDER = Path("unset")
_PRESET = "grpo.preset"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A configuration as far as it could be read, with its problems.

    Attributes:
        config: the configuration, with defaults (paths: `unset`) in place of the keys in `bad_keys`; None if the file
            cannot be read at all.
        problems: errors and warnings.
        bad_keys: dotted keys, or whole sections, whose value in `config` is not what the user wrote.
        origins: `file:line` or option that gave a value, by dotted key.
    """

    config: RunConfig | None
    problems: list[ConfigProblem]
    bad_keys: frozenset[str]
    origins: Mapping[str, str] = field(default_factory=dict)

    def placed(self, problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
        """Add to every problem where its key was given, if it was."""
        return [problem if problem.where else replace(problem, where=self._place(problem.key)) for problem in problems]

    def _place(self, key: str) -> str:
        """Return where a key was given; for a list's entry, at least where that is."""
        return self.origins.get(key) or (place_of(key, self.origins) if "[" in key else "")

    def usable(self, *wanted: str) -> bool:
        """Whether `config` holds what the user wrote for all of these dotted keys."""
        return self.config is not None and not any(_concerns(bad, key) for bad in self.bad_keys for key in wanted)


def _concerns(bad: str, key: str) -> bool:
    """Whether a bad key is `key`, its section or entry, or (`key` is a section or entry) one of its keys."""
    entry, bad_entry = (name.partition(".")[0] for name in (key, bad))
    if entry != bad_entry and "[" in entry and "[" in bad_entry:
        return False
    section, field = keys.split(key)
    bad_section, bad_field = keys.split(bad)
    return section == bad_section and (not field or bad_field in ("", field))


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a configuration (no other file than `path` is opened).

    Args:
        path: YAML file; None: `overrides` only. Relative paths in it are relative to its folder, except
            `run.output_dir`, which is relative to the working directory.
        overrides: `section.key=value`, the value in YAML; a later one wins. Paths in them are relative to the working
            directory.
    Raises: ConfigErrors: with all errors.
    """
    draft = draft_config(path, overrides)
    errors = errors_only(draft.problems)
    if errors or draft.config is None:
        raise ConfigErrors(errors)
    return draft.config


def draft_config(path: Path | None, overrides: Sequence[str] = ()) -> Draft:
    """Like `load_config`, but return the problems and a configuration that can be checked further. Never raises."""
    parsed, problems = parse_overrides(overrides)
    try:
        source = YamlSource(values={}) if path is None else read_yaml(path)
    except ConfigErrors as unreadable:
        return Draft(config=None, problems=[*unreadable.problems, *problems], bad_keys=frozenset(keys.all_keys()))
    values, origins = _merge(source, path)
    problems += _override(values, origins, parsed)
    problems += _drop_removed(values, origins)
    _note_preset(values, origins)
    config, invalid = _validate(values, origins, source.root)
    # A rejected option invalidates its key, not the rest of its section.
    known = set(keys.all_keys())
    rejected = {problem.key for problem in (*source.problems, *problems) if ".".join(keys.split(problem.key)) in known}
    draft = Draft(
        config=config,
        problems=[*source.problems, *problems, *invalid],
        bad_keys=frozenset(rejected | {problem.key for problem in invalid}),
        origins=origins,
    )
    if config is not None:
        draft.problems.extend(draft.placed(cross_check(config, draft.usable)))
    return draft


def dump_resolved(config: RunConfig) -> str:
    """Dump the configuration as YAML, with every key and absolute paths; loading it gives an equal configuration."""
    data = config.model_dump(mode="python")
    for section, content in data.items():
        for entry in content if section in LISTED else [content or {}]:
            for name, value in entry.items():
                entry[name] = paths.written(f"{section}.{name}", value)
    for name in LISTED:
        data[name] = data[name][0] if len(data[name]) == 1 else list(data[name])
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def _merge(source: YamlSource, path: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the file's raw values with absolute paths, and where each dotted key was given.

    A list of one entry is the same as the entry alone, which has the simpler keys.
    """
    base = Path.cwd() if path is None else path.absolute().parent
    values: dict[str, Any] = {}
    lines = dict(source.lines)
    for section, content in source.values.items():
        if isinstance(content, list) and len(content) == 1 and section in LISTED:
            first = f"{section}[0]"
            lines |= {section + key.removeprefix(first): line for key, line in lines.items() if key.startswith(first)}
        values[section] = _with_absolute_paths(section, _plain(section, content), base)
    return values, {key: f"{path}:{line}" for key, line in lines.items()}


def _override(
    values: dict[str, Any], origins: dict[str, str], overrides: Sequence[Override]
) -> Iterator[ConfigProblem]:
    """Put the options into the raw values; yield a problem for each that names an entry which is not there."""
    for override in overrides:
        name = override.section
        if not override.field:
            _replace(values, origins, override)
            continue
        if values.get(name) in (None, []):
            values[name] = {}
        section = values[name]
        if isinstance(section, list) and override.index is None:
            which = f"say which, e.g. {name}.0.{override.field}"
            yield _not_there(override, f"the file has a list of {len(section)}", which)
            continue
        entries = section if isinstance(section, list) else [section]
        place = override.index or 0
        if place >= len(entries):
            yield _not_there(override, f"the file has {len(entries)} of them, and the first is {name}.0", "")
        elif isinstance(entries[place], dict):
            entry = f"{name}[{place}]" if isinstance(section, list) else name
            if override.field == "kind" and name in LISTED:
                _forget_other_kinds(name, str(override.value), entries[place], entry, origins)
            if override.key == _PRESET:
                _forget(entries[place], preset_values(override.value), entry, origins)
            given = {override.field: override.value}
            entries[place].update(_with_absolute_paths(name, given, Path.cwd()))
            origins[f"{entry}.{override.field}"] = f"--set {override.text}"


def _plain(section: str, content: Any) -> Any:
    """Return a list's raw content in its plainest form: a text as the entry of that kind, one entry by itself."""
    if section not in LISTED:
        return content
    if isinstance(content, list) and len(content) != 1:
        return [_plain(section, entry) for entry in content]
    entry = content[0] if isinstance(content, list) else content
    return {"kind": entry} if isinstance(entry, str) else entry


def _replace(values: dict[str, Any], origins: dict[str, str], override: Override) -> None:
    """Put an option's list in place of the file's."""
    name = override.section
    for key in [key for key in origins if keys.split(key)[0] == name]:
        del origins[key]
    values[name] = _with_absolute_paths(name, _plain(name, override.value), Path.cwd())
    places = range(len(values[name])) if isinstance(values[name], list) else ()
    origins |= dict.fromkeys([name, *(f"{name}[{place}]" for place in places)], f"--set {override.text}")


def _forget_other_kinds(section: str, kind: str, given: dict[str, Any], entry: str, origins: Mapping[str, str]) -> None:
    """Remove the file's settings that another kind reads: an option chooses this kind instead of the file's."""
    model = keys.kinds(section).get(kind)
    if model is not None:
        _forget(given, [name for name in keys.fields_of(section) if name not in model.model_fields], entry, origins)


def _forget(given: dict[str, Any], names: Iterable[str], entry: str, origins: Mapping[str, str]) -> None:
    """Remove the file's settings of these names; those that options give stay."""
    for name in names:
        if not origins.get(f"{entry}.{name}", "").startswith("--set"):
            given.pop(name, None)


def _drop_removed(values: dict[str, Any], origins: Mapping[str, str]) -> Iterator[ConfigProblem]:
    """Remove settings of the release before, with a warning for each."""
    for key, advice in keys.REMOVED.items():
        section, name = keys.split(key)
        given = values.get(section)
        if isinstance(given, dict) and name in given:
            why, where = "is no setting any more and does nothing", origins.get(key, "")
            yield problem(key, given.pop(name), why, advice, where=where, severity="warning")


def _note_preset(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Note that what the preset sets was given where the preset was."""
    section, name = keys.split(_PRESET)
    given = values.get(section)
    if isinstance(given, dict):
        for field_name in preset_values(given.get(name)):
            if field_name not in given:
                origins[f"{section}.{field_name}"] = origins.get(_PRESET, _PRESET)


def _not_there(override: Override, message: str, suggestion: str) -> ConfigProblem:
    return problem(override.key, override.value, message, suggestion, where=f"--set {override.text}")


def _with_absolute_paths(section: str, content: Any, base: Path) -> Any:
    """Copy a section's raw content with absolute paths; an empty section is one without keys, or without entries."""
    if isinstance(content, list) and section in LISTED:
        return [_with_absolute_paths(section, entry, base) for entry in content]
    if content is None:
        return [] if section in LISTED and not keys.has_default_kind(section) else {}
    if not isinstance(content, dict):
        return content
    result = dict(content)
    for name, value in content.items():
        key = f"{section}.{name}"
        result[name] = paths.anchored(key, value, Path.cwd() if key in _RELATIVE_TO_WORKING_DIRECTORY else base)
    return result


def _validate(
    values: dict[str, Any], origins: dict[str, str], root: yaml.Node | None
) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """Return the configuration, with invalid values replaced by defaults, and a problem for each of them.

    Args:
        root: the file's, for the texts of values.
    """
    try:
        return _anchored(RunConfig.model_validate(values, strict=True)), []
    except ValidationError as error:
        problems = [translate(detail, origins, root) for detail in error.errors(include_url=False)]
        locations = [detail["loc"] for detail in error.errors(include_url=False)]
    for location in locations:
        _discard(values, location)
    for key in ("model.path", "data.train"):
        section, name = keys.split(key)
        values.setdefault(section, {}).setdefault(name, _PLACEHOLDER)
    try:
        return _anchored(RunConfig.model_validate(values, strict=True)), problems
    except ValidationError:
        return None, problems


def _anchored(config: RunConfig) -> RunConfig:
    """Make `run.output_dir` absolute, so that a resolved file means the same in every working directory."""
    output_dir = paths.absolute(config.run.output_dir)
    return config.changed("run", output_dir=output_dir)


def _discard(values: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the value at `section[.key]`, which a location may lie within.

    A list's entry is emptied, which keeps the others' places, or the whole list removed if entries need a kind.
    """
    section = location[0]
    entries = values.get(str(section))
    may_be_empty = keys.has_default_kind(str(section))
    if may_be_empty and isinstance(entries, list) and len(location) > 1:
        entries[int(location[1])] = {}
    elif len(location) == 1 or section in LISTED or not isinstance(entries, dict):
        values.pop(section, None)  # type: ignore[arg-type]
    else:
        entries.pop(location[1], None)
