"""Turns a YAML file and `--set` options into a `RunConfig`, or reports everything that is wrong with them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tandem_config import entries, keys, paths
from tandem_config.cross_checks import cross_check
from tandem_config.messages import translate
from tandem_config.overrides import Override, parse_overrides
from tandem_config.problems import ConfigErrors, ConfigProblem, errors_only
from tandem_config.schema import RunConfig
from tandem_config.yaml_source import YamlSource, read_yaml

# Results must not go beside the file by default: an example's file can lie in a read-only folder.
_RELATIVE_TO_WORKING_DIRECTORY = frozenset({"run.output_dir"})
_PLACEHOLDER = Path("unset")


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
        return [
            problem if problem.where else replace(problem, where=self.origins.get(problem.key, ""))
            for problem in problems
        ]

    def usable(self, *wanted: str) -> bool:
        """Whether `config` holds what the user wrote for all of these dotted keys."""
        return self.config is not None and not any(
            key in self.bad_keys or key.partition(".")[0] in self.bad_keys for key in wanted
        )


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
    values, origins = _merge(source, path, parsed)
    config, invalid = _validate(values, origins)
    # A rejected option invalidates its key, not the rest of its section.
    rejected = {problem.key for problem in (*source.problems, *problems)} & set(keys.all_keys())
    draft = Draft(
        config=config,
        problems=[*source.problems, *problems, *invalid],
        # An entry of a list (`trackers[1].mode`) makes the whole list unusable.
        bad_keys=frozenset(rejected | {problem.key.partition("[")[0] for problem in invalid}),
        origins=origins,
    )
    if config is not None:
        draft.problems.extend(draft.placed(cross_check(config, draft.usable)))
    return draft


def dump_resolved(config: RunConfig) -> str:
    """Dump the configuration as YAML, with every key and absolute paths; loading it gives an equal configuration."""
    data = config.model_dump(mode="python")
    for name in keys.lists():
        data[name] = config.model_dump(mode="json", include={name})[name]
    for section in keys.sections():
        for name, value in data[section].items():
            data[section][name] = paths.written(f"{section}.{name}", value)
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def _merge(
    source: YamlSource, path: Path | None, overrides: Sequence[Override]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the raw values with absolute paths, and where each dotted key was given."""
    base = Path.cwd() if path is None else path.absolute().parent
    values: dict[str, Any] = {
        section: _absolute_paths(section, content, base)
        if isinstance(content, dict)
        else ({} if content is None else content)
        for section, content in source.values.items()
    }
    origins = {key: f"{path}:{line}" for key, line in source.lines.items()}
    for name in keys.lists():
        if name in source.values:
            values[name] = entries.with_absolute_paths(source.values[name], base)
    for override in overrides:
        if override.field == "":
            values[override.section] = entries.with_absolute_paths(override.value, Path.cwd())
            origins[override.section] = f"--set {override.text}"
            continue
        section = values.setdefault(override.section, {})
        if isinstance(section, dict):
            section.update(_absolute_paths(override.section, {override.field: override.value}, Path.cwd()))
            origins[override.key] = f"--set {override.text}"
    return values, origins


def _absolute_paths(section: str, content: dict[Any, Any], base: Path) -> dict[Any, Any]:
    result = dict(content)
    for name, value in content.items():
        key = f"{section}.{name}"
        result[name] = paths.anchored(key, value, Path.cwd() if key in _RELATIVE_TO_WORKING_DIRECTORY else base)
    return result


def _validate(values: dict[str, Any], origins: dict[str, str]) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """Return the configuration, with invalid values replaced by defaults, and a problem for each of them."""
    try:
        return _anchored(RunConfig.model_validate(values, strict=True)), []
    except ValidationError as error:
        problems = [translate(detail, origins) for detail in error.errors(include_url=False)]
        locations = [detail["loc"] for detail in error.errors(include_url=False)]
    for location in locations:
        _discard(values, location)
    for key in ("model.path", "data.train"):
        section, _, name = key.partition(".")
        values.setdefault(section, {}).setdefault(name, _PLACEHOLDER)
    try:
        return _anchored(RunConfig.model_validate(values, strict=True)), problems
    except ValidationError:
        return None, problems


def _anchored(config: RunConfig) -> RunConfig:
    """Make `run.output_dir` absolute, so that a resolved file means the same in every working directory."""
    output_dir = paths.absolute(config.run.output_dir)
    return config.model_copy(update={"run": config.run.model_copy(update={"output_dir": output_dir})})


def _discard(values: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the value at `section[.key]`; a location inside a value removes the whole value."""
    section = location[0]
    if len(location) == 1 or not isinstance(values.get(str(section)), dict):
        values.pop(section, None)  # type: ignore[arg-type]
    else:
        values[str(section)].pop(location[1], None)
