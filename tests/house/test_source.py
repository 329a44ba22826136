"""Rules about our own source that no linter has: no fixed sleeps, no pickle, a first line that says what it is for."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, calls, name_of, parse, python_files

# Files that may sleep, and why each can neither wait for an event nor run on without end. Tests are not looked at:
# they may give another thread a moment before they see that nothing has happened.
SLEEPERS = {
    "coordinator/fleet/kubernetes/arrivals.py": "looks at Redis and the pods for services that come; has a deadline",
    "coordinator/fleet/kubernetes/keeper.py": "looks at the fleet from time to time, until the run ends",
    "coordinator/fleet/kubernetes/returns.py": "looks at the pods of a lost trainer until it is back; has a deadline",
    "coordinator/lead.py": "asks a Redis that is away again whether we lead the run; has a deadline",
    "coordinator/clients/probing.py": "asks a service how it is; ends with the call that it accompanies",
    "coordinator/sync/roll_call.py": "looks again for services that come back; has a deadline",
    "coordinator/fleet/services.py": "asks a trainer that is being started again whether it answers; has a deadline",
    "coordinator/sync/weights.py": "tries a round again until a rank has its slot back; has a deadline",
    "launcher/view/follow.py": "asks Redis who has announced itself; ends with the processes it follows",
    "launcher/run/guard.py": "polls process ids that are not its children: nothing to wait on; has a deadline",
    "rollout_service/hosts/connection.py": "looks for a worker, by a deadline; then beats until one of both ends",
    "servicekit/redis/client.py": "tries a Redis that does not answer yet again; has a deadline",
    "servicekit/redis/registry.py": "asks a Redis that refuses what we need again; has a deadline",
    "trainer_service/ranks/liveness.py": "waits for other ranks to report an error, or to miss a beat; has a deadline",
    "trainer_service/ranks/world.py": "connects again to a store whose rank 0 is still starting; has a deadline",
    "weightsync/group/coordinator_lease.py": "asks a Redis that does not answer yet who leads the run; has a deadline",
    "launcher/run/redis_server.py": "pings a server that says nothing when it is ready; has a deadline",
    "launcher/view/top.py": "draws a run once a second until it is over; gives up where nobody answers for a minute",
}
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


def sleeps(path: Path) -> list[str]:
    return [
        f"{name_of(path)}:{call.lineno}: {name}"
        for name, call in calls(parse(path))
        if name in SLEEPS and not is_yield(call)
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
    own = python_files(*PACKAGES, "tools", "examples")
    assert [line for path in own if name_of(path) not in SLEEPERS for line in sleeps(path)] == []


def test_the_allow_list_is_true() -> None:
    for name, reason in SLEEPERS.items():
        path = next(path for path in python_files() if name_of(path) == name)
        assert sleeps(path), f"{name} sleeps no more: remove it"
        assert len(reason) > 20


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
