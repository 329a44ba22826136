"""Fixtures for tests of all kinds: a real Redis server per test, on a Unix socket."""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.kit.certificates import Authority
from tests.kit.forked import ForkedProcess
from tests.kit.processes import start_coordinator
from tests.kit.redis import RedisProcess

# Every process of the tests computes on the CPU, also on a machine with GPUs, which `make gpu-check` is for.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("TANDEM_DEVICE", None)
# kubectl and promtool collect garbage less often: they live for a tenth of a second, a third of which it takes.
os.environ.setdefault("GOGC", "400")
# Their tests share no engine: each runs wherever a worker is free.
SPREAD = ("tests/chaos/",)
# Their tests share what takes minutes to make: a Docker engine with images, services with real engines.
TOGETHER = ("tests/images/", "tests/chaos/test_real_engines.py")
# The order of work: what takes a worker minutes begins first, what comes in small pieces fills the gaps at the end.
FIRST = (
    "tests/images/",
    "tests/integration/trainer/test_parity.py",
    "tests/e2e/",
    "tests/chaos/test_real_engines.py",
    "tests/integration/",
    "tests/contract/",
)
# And then what leaves process groups behind, whose threads slow down what measures time.
LAST = ("tests/chaos/", "tests/unit/trainer/")


class BySharedEngines(LoadScopeScheduling):
    """A file's tests stay in one worker, because they share its engines. (In pytest 9.2 `xdist_group` does nothing.)"""

    def _split_scope(self, nodeid: str) -> str:
        together = next((place for place in TOGETHER if nodeid.startswith(place)), None)
        if together is not None:
            return together
        return nodeid if nodeid.startswith(SPREAD) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """How `--dist loadfile` shares the tests out, in `make test`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by number of tests; ours is pytest_collection_modifyitems
    return BySharedEngines(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests in the order in which workers take them."""
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid: str) -> int:
    if nodeid.startswith(FIRST):
        return next(turn for turn, folder in enumerate(FIRST) if nodeid.startswith(folder))
    last = next((turn for turn, folder in enumerate(LAST, start=1) if nodeid.startswith(folder)), 0)
    return len(FIRST) + last


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Names a failed test at once: of a run that takes an hour, or is cut off, the summary may never be seen."""
    if not report.failed:
        return None
    category = "failed" if report.when == "call" else "error"
    return category, f"\n{category}: {report.nodeid}\n", category.upper()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Leaves what was made before a file's tests out of their collections: 5 s each, where a worker has torch."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture
def redis_process() -> Iterator[Callable[..., RedisProcess]]:
    """Starts Redis servers: `redis_process(password="", append_only=False)`; ended after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda password="", **options: stack.enter_context(RedisProcess(password, **options))


@pytest.fixture
def redis_server(redis_process: Callable[..., RedisProcess]) -> str:
    """URL of an empty Redis server of this test's own."""
    return redis_process().url


@pytest.fixture(scope="module")
def module_redis() -> Iterator[str]:
    """URL of a Redis server that a module's tests share."""
    with RedisProcess() as server:
        yield server.url


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`spawn("coordinator", "--resume", variables={}, stderr=PIPE)`: starts `python -m ...`; killed after the test.

    A coordinator that writes to a file is a fork (tests/kit/processes.py).
    """
    started: list[Any] = []

    def start(*arguments: str, variables: Mapping[str, str] | None = None, **options: Any) -> Any:
        if arguments[0] == "coordinator" and not isinstance(options.get("stderr"), int) and len(options) == 1:
            process: Any = start_coordinator(arguments[1:], variables or {}, options["stderr"].fileno())
        else:
            environment = {**os.environ, **(variables or {})}
            process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, text=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10) if isinstance(process, ForkedProcess) else process.communicate(timeout=10)


@pytest.fixture(scope="session")
def authority() -> Authority:
    """The authority that a run's processes believe."""
    return Authority("ours")
