"""Links of the documents lead somewhere, files that they name exist, and the map of the code stays a map."""

import re
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, REPO, files, name_of

PAGES = [path for path in files() if path.suffix == ".md"]
ARCHITECTURE = REPO / "ARCHITECTURE.md"
CODE_PATHS = REPO / "docs" / "code-paths.md"
MAX_LINES, MAX_CHARACTERS = 120, 140
_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file or folder of the repository in backticks, as `coordinator/run.py` or `coordinator/data/`.
_TOPS = "|".join([*PACKAGES, "tools", "tests", "examples", "deploy", "benchmarks", "requirements", "protos"])
_NAMED = re.compile(rf"`((?:{_TOPS})/[\w./-]*[\w/])`")
# What stands for a name: `coordinator/rewards/NAME.py`.
_ANY_NAME = re.compile(r"NAME|SECTION")


def prose(path: Path) -> str:
    """The text of a page without blocks of code."""
    return _BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The names by which GitHub links the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    """Links of a page to files or headings that do not exist; addresses elsewhere are not looked at."""
    found = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path))):
        place, _, heading = link.partition("#")
        target = path.parent / place if place else path
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (heading and target.suffix == ".md" and heading not in anchors(target)):
            found.append(link)
    return found


def missing(path: Path) -> list[str]:
    """Files and folders that a page names and that do not exist."""
    named = set(_NAMED.findall(prose(path)))
    return sorted(name for name in named if not _ANY_NAME.search(name) and not (REPO / name).exists())


def test_links_lead_somewhere() -> None:
    assert [f"{name_of(path)}: {link}" for path in PAGES for link in broken(path)] == []


def test_files_that_documents_name_exist() -> None:
    pages = [path for path in PAGES if path.name != "CHANGELOG.md"]
    assert [f"{name_of(path)}: {name}" for path in pages for name in missing(path)] == []


def test_a_broken_link_and_a_missing_file_are_recognised(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[a](#a-b) [b](#c) [c](other.md) [d](https://x.y/z) `[e](no.md)`\n```\n[f](no.md)\n```\n"
        "`coordinator/nothing.py` `coordinator/app.py` `coordinator/NAME.py`\n",
        encoding="utf-8",
    )
    assert broken(page) == ["#c", "other.md"]
    assert missing(page) == ["coordinator/nothing.py"]


def test_the_map_is_short() -> None:
    lines = ARCHITECTURE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [f"{number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > MAX_CHARACTERS] == []


@pytest.mark.parametrize("heading", ["The path of a prompt", "The path of a weight"])
def test_the_files_of_a_path_exist_once(heading: str) -> None:
    section = CODE_PATHS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    listed = section.partition("\n```\n")[2].partition("\n```\n")[0].split()
    assert len(listed) > 20
    assert [name for name in listed if not (REPO / name).is_file()] == []
    assert len(set(listed)) == len(listed)
