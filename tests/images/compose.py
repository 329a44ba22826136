"""docker-compose.yml as data, with anchors resolved and variables as written."""

import re
from functools import cache
from typing import Any

import yaml

from tests.house.repository import REPO

FILE = REPO / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
# Services that run our code, by what they run.
OURS = {
    "coordinator": ("coordinator", "coordinator-gpu", "coordinator-standby", "coordinator-standby-gpu"),
    "trainer": ("trainer", "trainer-gpu"),
    "rollout": ("rollout-0", "rollout-1", "rollout", "rollout-0-gpu", "rollout-1-gpu"),
}
# Of which a command says how many there are: none without it.
SCALED = "rollout"


@cache
def compose() -> dict[str, Any]:
    """The whole file."""
    found: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def service(name: str) -> dict[str, Any]:
    """One service."""
    found: dict[str, Any] = compose()["services"][name]
    return found


def of_profile(profile: str) -> set[str]:
    """Names of the services that `--profile PROFILE` starts."""
    services = compose()["services"].items()
    return {name for name, each in services if profile in each.get("profiles", [profile]) and each.get("scale", 1)}


def resolved(text: str) -> str:
    """A value with the defaults of its variables put in."""
    return VARIABLE.sub(lambda match: match[2] or "", text)


def variables() -> set[str]:
    """Every variable that the file takes from the user's environment."""
    text = "\n".join(line.partition("#")[0] for line in FILE.read_text(encoding="utf-8").splitlines())
    return {match[1] for match in VARIABLE.finditer(text)}
