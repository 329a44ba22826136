"""What the house tests look at: the files that are, or would be, committed, and their syntax trees."""

import ast
import subprocess
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = (
    "tandem_clients",
    "tandem_config",
    "tandem_files",
    "servicekit",
    "weightsync",
    "trainer_service",
    "rollout_service",
    "reward_service",
    "environment_service",
    "coordinator",
    "launcher",
)
GIT_TIMEOUT_S = 30.0


@cache
def files() -> tuple[Path, ...]:
    """Returns every file that git tracks or would add, as absolute paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, check=True, timeout=GIT_TIMEOUT_S, text=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := REPO / name).is_file())


def name_of(path: Path) -> str:
    """Returns the path as the repository knows it."""
    return path.relative_to(REPO).as_posix()


def python_files(*tops: str) -> list[Path]:
    """Returns our Python files under the top-level folders `tops` (all but the generated ones where none is given)."""
    own = [path for path in files() if path.suffix == ".py" and not name_of(path).startswith("tandem_api/")]
    return [path for path in own if not tops or name_of(path).split("/")[0] in tops]


@cache
def parse(path: Path) -> ast.Module:
    """Returns the syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` of a name or attribute access, an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Returns what each name that the module imports stands for: {"sleep": "time.sleep", "np": "numpy"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Returns every call with the full dotted name of what it calls, imports resolved."""
    names = imported_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            head, _, rest = name.partition(".")
            full = names.get(head, head)
            found.append((f"{full}.{rest}" if rest else full, node))
    return found
