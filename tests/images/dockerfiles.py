"""A Dockerfile as stages of instructions: enough of the language for our own files."""

import re
from dataclasses import dataclass, field

from tests.house.repository import REPO

FOLDER = REPO / "deploy" / "images"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: `RUN`, and what follows it on one line."""

    word: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """From one FROM to the next. parent: the image or the stage that it starts from, variables as written."""

    name: str
    parent: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Dockerfile:
    """The whole file. arguments: ARGs before the first FROM, with their defaults ("" for none)."""

    text: str
    arguments: dict[str, str]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def line(self, name: str) -> list[Stage]:
        """The stage and those that it is built on, the oldest first."""
        stage = self.stage(name)
        known = {each.name for each in self.stages}
        return [*(self.line(stage.parent) if stage.parent in known else []), stage]

    def effective(self, name: str, word: str) -> str | None:
        """What the last instruction of a kind says, in the stage or in one that it is built on."""
        found = [each.text for stage in self.line(name) for each in stage.instructions if each.word == word]
        return found[-1] if found else None

    def all(self, word: str) -> list[str]:
        """Every instruction of a kind, in all stages."""
        return [each.text for stage in self.stages for each in stage.instructions if each.word == word]


def parse(text: str) -> Dockerfile:
    """Reads a Dockerfile. Raises: ValueError: an instruction before the first FROM that is no ARG."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            stages.append(Stage(name=name, parent=parent))
        elif stages:
            stages[-1].instructions.append(Instruction(word=word, text=rest))
        elif word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            raise ValueError(f"{word} before the first FROM")
    return Dockerfile(text=text, arguments=arguments, stages=stages)


def read(image: str) -> Dockerfile:
    """The Dockerfile of coordinator, trainer or rollout."""
    return parse((FOLDER / f"{image}.Dockerfile").read_text(encoding="utf-8"))


def copied(text: str) -> tuple[list[str], bool]:
    """Sources of a COPY, and whether they come from the checkout (not from another stage)."""
    words = text.split()
    options = [word for word in words if word.startswith("--")]
    sources = [word for word in words if not word.startswith("--")][:-1]
    return sources, not any(option.startswith("--from=") for option in options)
