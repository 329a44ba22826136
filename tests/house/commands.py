"""The commands that the documents show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.repository import REPO, name_of

_BLOCK = re.compile(r"^```(console|bash|sh)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a document; `words` are split as a shell does, without leading assignments."""

    document: Path
    words: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Program and subcommand, or `python -m module`; any `kubectl`."""
        program = Path(self.words[0]).name
        if program.startswith("python") and self.words[1:2] == ("-m",):
            return f"python -m {self.words[2]}"
        return program if program == "kubectl" else " ".join([program, *self.words[1:2]])

    def __str__(self) -> str:
        return f"{name_of(self.document)}: {shlex.join(self.words)}"


def lines_in(document: Path) -> list[str]:
    """Returns the command lines of a Markdown file: after `$ ` in a console block, all but comments in a script."""
    found = []
    for language, text in _BLOCK.findall(document.read_text(encoding="utf-8")):
        lines = text.replace("\\\n", " ").splitlines()
        if language == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        else:
            found += [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


def commands_in(document: Path) -> list[Command]:
    """Returns the commands of a Markdown file, `a && b` as two."""
    found = []
    for line in lines_in(document):
        for part in re.split(r"&&|;", line.partition(" #")[0]):
            words = shlex.split(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                found.append(Command(document=document, words=tuple(words)))
    return found


def documents() -> list[Path]:
    """Returns the Markdown files whose commands are promises."""
    named = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
    return [path for path in named if path.is_file()] + sorted((REPO / "examples").rglob("*.md"))
