"""Rules about our own source that no linter has: no fixed sleeps, no pickle, a first line that says what it is for."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, calls, name_of, parse, python_files

SLEEPS = {"time.sleep", "asyncio.sleep", "anyio.sleep"}

PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# torch.distributed's object collectives pickle what they send and unpickle what they receive.
OBJECT_COLLECTIVES = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def is_yield(call: ast.Call) -> bool:
    """Says whether it is `sleep(0)`: that gives way to other tasks and waits for nothing."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def fixed_sleeps(tree: ast.Module) -> list[str]:
    """Sleeps that are not the pause of a loop that looks again, or whose length has no name."""
    loops = [loop for loop in ast.walk(tree) if isinstance(loop, ast.While)]
    pauses = {id(node) for loop in loops for node in ast.walk(loop)}
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for name, call in calls(tree)
        if name in SLEEPS
        and not is_yield(call)
        and (id(call) not in pauses or any(isinstance(argument, ast.Constant) for argument in call.args))
    ]


def pickled(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [node.module]
        found += [f"import {module}" for module in modules if module.split(".")[0] in PICKLERS]
    for name, call in calls(tree):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        if name.split(".")[-1] in OBJECT_COLLECTIVES:
            found.append(name)
        if name == "torch.load" and not is_true(options.get("weights_only")):
            found.append("torch.load without weights_only=True")
        if name == "numpy.load" and is_true(options.get("allow_pickle")):
            found.append("numpy.load with allow_pickle=True")
    return found


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_nothing_sleeps_for_a_fixed_time() -> None:
    """Tests are not looked at: they may give another thread a moment before they see that nothing has happened."""
    own = python_files(*PACKAGES, "tools", "examples")
    assert {name_of(path): found for path in own if (found := fixed_sleeps(parse(path)))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time as t\nt.sleep(PAUSE_S)", 1),
        ("from asyncio import sleep as nap\nwhile True:\n    await nap(2)", 1),
        ("import asyncio\nwhile not done():\n    await asyncio.sleep(PAUSE_S)", 0),
        ("import asyncio\nawait asyncio.sleep(0)", 0),
    ],
)
def test_a_fixed_sleep_is_recognised(source: str, found: int) -> None:
    assert len(fixed_sleeps(ast.parse(source))) == found


def test_nothing_is_pickled() -> None:
    found = [f"{name_of(path)}: {what}" for path in python_files(*PACKAGES) for what in pickled(parse(path))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_pickling_is_recognised(source: str) -> None:
    assert len(pickled(ast.parse(source))) == 1


def test_reading_weights_only_is_not_pickling() -> None:
    assert pickled(ast.parse("import torch\ntorch.load('x', weights_only=True)")) == []


def test_every_module_says_what_it_is_for() -> None:
    silent = []
    for path in python_files(*PACKAGES, "tools", "examples"):
        docstring = ast.get_docstring(parse(path)) or ""
        if len(docstring.partition("\n")[0]) < 20:
            silent.append(name_of(path))
    assert silent == []


MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def too_long(path: Path) -> list[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    found = [f"{name_of(path)}: {lines} lines"] if lines > MAX_FILE_LINES else []
    functions = [n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f"{name_of(path)}: {each.name}": (each.end_lineno or 0) - each.lineno + 1 for each in functions}
    return found + [f"{name}: {size} lines" for name, size in sizes.items() if size > MAX_FUNCTION_LINES]


def test_files_and_functions_stay_small() -> None:
    """A file fits a reader's head, a function his screen."""
    assert [each for path in python_files(*PACKAGES, "tools") for each in too_long(path)] == []


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name_of(path))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_loggers_have_one_name() -> None:
    others = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "get_logger"
        and ast.unparse(node.targets[0]) != "log"
    ]
    assert others == []
