"""Prints the sizes for which the repository has a budget, each with its limit: `python -m tools.budget`.

`tests/house/test_budget.py` fails where one is above its limit. Only a commit that says why may raise a limit.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import grimp

REPO = Path(__file__).resolve().parent.parent
# Lines of the product, comments and blank lines included: what was measured when this limit was set, rounded up to the
# next hundred. The target of issue 28 is 56,500, with all behaviour. Raised by 29: arrays as bytes, in two forms, the
# ledger, and the stream of samples; by 30: two more schedules, a ledger whose steps take
# groups of several iterations, `tandem simulate` (750 lines), replicas that evaluate apart or are slow in a round, a
# pause that recomputes, the page's time line (230), the plot of `tandem simulate` (100), and what check and init
# foresee (250); by 31: turns whose ids are those that were sampled, and parsers of tool calls (700), environments and
# tools in worker processes (1,040), conversations between them and the policy (700), as a tree (400), in a server of
# their own (750), with metrics (50) and adapters of other libraries (690); by 32: a trainer that comes
# back (540), a standby (590), scaling (690), replicas that seed others (650), the run's life (300), bounds of calls and
# of histories (160).
PRODUCT_LINES = 80_000
# Modules with one importer that are short and no extension point: each is a door to a closet.
CLOSETS, CLOSET_LINES = 25, 60
# Lines of the two paths, so that each can be read in an afternoon. Raised by 29: what becomes of a prompt is noted,
# completions continue elsewhere, and what is submitted during a pause waits; by 30: a schedule has parts, a
# dispatch may last as long as the run, an engine drops the KV cache of what it keeps; a round has stragglers. By 29:
# what a step needs of the trainer is a protocol, so that what stands in for it is checked. By 31: which template,
# tools in prompts, answers between turns, and what an episode gets. By 32: what is asked of a lost trainer again,
# replicas that hand over, and refuse what they cannot hold; a replica as source of weights.
PROMPT_LINES, WEIGHT_LINES = 7_700, 5_900
SUBJECT_CHARACTERS = 72

# Folders that are not the product.
_OTHERS = ("tests", "tools", "tandem_api", "examples", "deploy")
# Modules of which a user or a contributor writes one more: each may be as short as it likes.
_EXTENSION_POINTS = (
    "coordinator/record/trackers/*.py",
    "coordinator/rewards/*.py",
    "tandem_config/checks/*.py",
    "tandem_config/sections/*.py",
    "trainer_service/objectives/policy/*.py",
    "weightsync/families/*.py",
)
# The documents that may list the files of the two paths: the first one with the heading counts.
_DOCUMENTS = ("docs/code-paths.md", "ARCHITECTURE.md")
# Commits that are looked at, from the newest one back to the one that added this rule.
_COMMITS = 200
_RULE = "tests/house/test_budget.py"
_GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A size and its limit.

    Attributes:
        wrong: what must be changed whatever the size is, e.g. files that do not exist.
    """

    name: str
    size: int
    limit: int
    wrong: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether the size is within its limit, and nothing is wrong."""
        return self.size <= self.limit and not self.wrong

    def __str__(self) -> str:
        mark = "" if self.fits else "  too much" if self.size > self.limit else "  wrong"
        return "\n    ".join([f"{self.name:48} {self.size:7,} of {self.limit:7,}{mark}", *self.wrong])


def product_lines(repo: Path = REPO) -> Figure:
    """Count the lines of the product's Python, committed or about to be."""
    listed = _git(repo, "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    files = [repo / name for name in set(listed.splitlines()) if name.split("/")[0] not in _OTHERS]
    lines = sum(_num_lines(file) for file in files if file.is_file())
    return Figure(name="lines of the product", size=lines, limit=PRODUCT_LINES)


def closets(repo: Path = REPO) -> Figure:
    """Count the modules that one other imports, that are short, and that are no extension point."""
    packages = [path.parent.name for path in sorted(repo.glob("*/__init__.py")) if path.parent.name not in _OTHERS]
    graph = grimp.build_graph(*packages, cache_dir=None)
    found = []
    for module in sorted(graph.modules):
        name = f"{module.replace('.', '/')}.py"
        users = graph.find_modules_that_directly_import(module)
        is_short = (repo / name).is_file() and _num_lines(repo / name) < CLOSET_LINES
        if is_short and len(users) == 1 and not any(fnmatch(name, point) for point in _EXTENSION_POINTS):
            found.append(f"{name}: only {users.pop()} imports it")
    # They are named where there are too many: merge some of them into their importers.
    return Figure(name="closets", size=len(found), limit=CLOSETS, wrong=found if len(found) > CLOSETS else ())


def prompt_path(repo: Path = REPO) -> Figure:
    """Count the lines on the path of a prompt. Raises: ValueError: no document lists its files."""
    return _path(repo, "The path of a prompt", PROMPT_LINES)


def weight_path(repo: Path = REPO) -> Figure:
    """Count the lines on the path of a weight. Raises: ValueError: no document lists its files."""
    return _path(repo, "The path of a weight", WEIGHT_LINES)


def _path(repo: Path, heading: str, limit: int) -> Figure:
    """Add up the files that the first fenced block below a heading lists, a path of the repository a line."""
    for document in _DOCUMENTS:
        text = (repo / document).read_text(encoding="utf-8") if (repo / document).is_file() else ""
        section = re.search(rf"^#+ {heading}$(.*?)(?=^#+ |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        block = section and re.search(r"^```\w*\n(.*?)^```", section[1], flags=re.MULTILINE | re.DOTALL)
        if block:
            names = block[1].split()
            wrong = [f"{document}: {name} does not exist" for name in names if not (repo / name).is_file()]
            wrong += [
                f"{document}: {name} is listed twice" for name in sorted({n for n in names if names.count(n) > 1})
            ]
            size = sum(_num_lines(repo / name) for name in names if (repo / name).is_file())
            return Figure(name=f"lines on {heading.lower()}, {len(names)} files", size=size, limit=limit, wrong=wrong)
    raise ValueError(f"no list of files below the heading {heading!r} in {' or '.join(_DOCUMENTS)}")


def commit_subject(repo: Path = REPO) -> Figure:
    """Find the longest subject of the commits since the rule, of those that the clone has."""
    added = _git(repo, "log", "-1", "--diff-filter=A", "--format=%H", "--", _RULE).strip()
    span = [f"{added}..HEAD"] if added else ["--max-count=0", "HEAD"]
    lines = _git(repo, "log", "--no-merges", f"--max-count={_COMMITS}", "--format=%h %s", *span).splitlines()
    subjects = [line.split(" ", 1) for line in lines]
    return Figure(
        name=f"longest subject of {len(subjects)} commits",
        size=max((len(subject) for _, subject in subjects), default=0),
        limit=SUBJECT_CHARACTERS,
        wrong=[f"{commit}: {subject}" for commit, subject in subjects if len(subject) > SUBJECT_CHARACTERS],
    )


FIGURES: tuple[Callable[[], Figure], ...] = (product_lines, closets, prompt_path, weight_path, commit_subject)


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _git(repo: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=repo, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S, text=True).stdout


def main() -> int:
    """Print the figures. Returns: 1 if one of them does not fit."""
    figures = [measure() for measure in FIGURES]
    print(*figures, sep="\n")
    return 0 if all(figure.fits for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
