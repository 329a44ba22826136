"""`tandem init`: chooses, writes, checks."""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from launcher.check.data.tokenizer import check_tokenizer
from launcher.check.model.folder import check_model
from launcher.check.rewards import check_imports
from launcher.commands import check_command
from launcher.init.choices import Choices, flow
from launcher.init.layout import HostMachine
from launcher.init.sample import first_row
from launcher.init.suggest import suggest_all
from launcher.report import headline, make_console, print_problems
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_config.cross_checks import cross_check
from tandem_config.loading import Draft, draft_config
from tandem_config.overrides import parse_overrides
from tandem_config.problems import ConfigErrors, ConfigProblem, errors_only, problem
from tandem_config.schema import LISTED, RunConfig
from tandem_files.atomic import write_bytes_atomic
from tandem_files.rows.problems import DataError

# Names that say nothing of the data; the folder's does.
_COMMON_NAMES = ("train", "training", "data", "rows", "dataset", "prompts")
# What the command prints of what it chose.
_SHOWN = ("data.prompt_key", "data.max_prompt_tokens", "reward", "trainer.tensor_parallel", "schedule.kind")
# Longest line of a comment in the file.
_WIDTH = 110
_HEADER = """\
# Written by `tandem init`. Change what you like: every other key has its default, and docs/configuration.md describes
# all of them. Relative paths are relative to this file.
"""


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """What the command line asks for; empty lists and None: not given."""

    model: Path
    data: Sequence[str]
    heldout: Sequence[str]
    reward: str | None
    prompt_key: str | None
    answer_key: str | None
    system_key: str | None = None
    out: Path | None
    force: bool
    overrides: Sequence[str]

    def options(self) -> list[str]:
        """Return the `--set` options that this means, the user's own last."""
        columns = {
            "data.prompt_key": self.prompt_key,
            "data.answer_key": self.answer_key,
            "data.system_key": self.system_key,
        }
        given = {"model.path": str(self.model), "data.train": _paths(self.data)}
        given |= {"data.heldout": _paths(self.heldout)} if self.heldout else {}
        given |= {key: value for key, value in columns.items() if value is not None}
        given |= {} if self.reward is None else {"reward.function": self.reward}
        return [*(f"{key}={value}" for key, value in given.items()), *self.overrides]

    @property
    def name(self) -> str:
        """Name of the run, after the data."""
        path = Path(self.data[0]).absolute()
        stem = path.parent.name if path.stem.lower() in _COMMON_NAMES or "*" in path.stem else path.stem
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:40] or "my-run"


def _paths(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else json.dumps(list(texts))


def init_command(asked: InitRequest, machine: HostMachine) -> int:
    """Run `tandem init`. Returns: the exit code, that of `tandem check` if the file was written."""
    complaints, console = make_console(stderr=True), make_console()
    out = Path(f"{asked.name}.yaml") if asked.out is None else asked.out
    try:
        _check_out(out, force=asked.force)
        choices = choose(asked, machine)
        content = render(choices, out.absolute().parent)
        write_bytes_atomic(out, content.encode())
    except (ConfigErrors, ValueError, OSError) as error:
        problems = _problems(error)
        print_problems(complaints, problems)
        complaints.print(Text(f"{out} not written: {headline(problems)}", style="bold red"))
        return EXIT_BAD_CONFIG
    console.print(Text(f"wrote {out}"))
    for key in _SHOWN:
        section, _, field = key.partition(".")
        value = getattr(getattr(choices.config, section), field) if field else choices.config.reward[0].label
        console.print(Text(f"  {key}: {flow(value)}  ({choices.reasons[key] or 'as given'})"))
    gpu_gib = machine.gpu_gib if machine.has_gpus else None
    host_gib = None if gpu_gib is None else machine.host_gib
    code = check_command(out, [], gpu_memory_gib=gpu_gib, host_memory_gib=host_gib)
    command = "tandem run" if code == EXIT_OK else "correct the errors, then: tandem check"
    console.print(Text(f"next: {command} -c {out}"))
    return code


def choose(asked: InitRequest, machine: HostMachine) -> Choices:
    """Choose the configuration. Raises: ConfigErrors, ValueError, OSError: what was given cannot be used."""
    draft = draft_config(None, asked.options())
    # Keys that do not go together are left to the check of the file: suggestions may still change one of them.
    together = [] if draft.config is None else draft.placed(cross_check(draft.config, draft.usable))
    wrong = [problem for problem in errors_only(draft.problems) if problem not in together]
    if draft.config is None or wrong:
        raise ConfigErrors(wrong)
    spec, problems = check_model(draft.config, draft.usable)
    codec, found = check_tokenizer(draft.config, spec)
    problems += [*found, *_reward_problems(draft)]
    if spec is None or codec is None or errors_only(problems):
        raise ConfigErrors(errors_only(problems))
    choices = Choices(draft.config, _given(asked.options()))
    choices.suggest("run.name", asked.name, f"results will be in runs/{asked.name}")
    suggest_all(choices, spec, codec, machine)
    return choices


def render(choices: Choices, folder: Path) -> str:
    """Return the text of the file, which will lie in `folder`."""
    written = choices.written(folder)
    sections = [name for name in RunConfig.model_fields if name in written]
    parts = ["\n".join(_section(choices, name, written[name])) for name in sections]
    parts += ["\n".join(f"# {line}" for line in choices.hints)] if choices.hints else []
    return _HEADER + "".join(f"\n{part}\n" for part in parts)


def _section(choices: Choices, name: str, content: object) -> Iterator[str]:
    if isinstance(content, dict) and name not in LISTED:
        yield f"{name}:"
        for key, value in content.items():
            yield from _comment(choices.reasons[f"{name}.{key}"], "  ")
            yield f"  {key}: {flow(value)}"
        return
    yield from _comment(choices.reasons[name], "")
    yield f"{name}: {flow(content)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, _WIDTH))


def _reward_problems(draft: Draft) -> list[ConfigProblem]:
    """Import the user's own rewards."""
    if draft.config is None:
        return []
    _, record = first_row(draft.config.data, "train")
    return list(check_imports(draft.config, draft.usable, list(record)))


def _given(options: Sequence[str]) -> list[str]:
    """Return the keys that options set, in the schema's words; a list as a whole."""
    overrides, _ = parse_overrides(options)
    return [item.section if item.section in LISTED else f"{item.section}.{item.field}" for item in overrides]


def _check_out(out: Path, *, force: bool) -> None:
    advice = "give --out NAME.yaml, in a folder that exists"
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigErrors([problem("--out", out, "is no name of a YAML file", advice)])
    if not out.absolute().parent.is_dir():
        raise ConfigErrors([problem("--out", out, "its folder does not exist", advice)])
    if out.exists() and not force:
        raise ConfigErrors([problem("--out", out, "exists", "give another name with --out, or --force to replace it")])


def _problems(error: ConfigErrors | ValueError | OSError) -> list[ConfigProblem]:
    if isinstance(error, ConfigErrors):
        return error.problems
    if isinstance(error, DataError):
        return [problem("--data", found.place, found.text) for found in error.problems]
    key = "environment" if isinstance(error, OSError) else "data.chat_template"
    return [problem(key, "", str(error).removeprefix(f"{key}: "))]
