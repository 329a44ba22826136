"""Whatever ends a coordinator has a reason that names the part: in its last line and in state.json, for every error."""

import asyncio
import errno
import logging
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pyarrow as pa
import pytest
import redis

from coordinator.app import conduct
from coordinator.checkpoints import writing
from coordinator.data.cursor import DataCursor
from coordinator.generate.dispatch import Rollouts
from coordinator.learn.evaluation import Evaluator
from coordinator.record.progress import Progress
from coordinator.record.samples.sink import SampleSink
from coordinator.record.state import RunState
from coordinator.rewards.exact_match import ExactMatch
from coordinator.sync.weight_sync import WeightSync
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ERRORS
from servicekit.redis.registry import Registry
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tandem_config.schema import RunConfig
from tandem_files.metrics_file import MetricsFile
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from weightsync.membership.coordinator_lease import CoordinatorLease

FILE = "/nowhere/file"
OF_FILES = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT)
CAUSES: list[Callable[[], BaseException]] = [
    *(partial(kind, "boom") for kind in ERRORS),
    *(partial(OSError, number, f"boom {errno.errorcode[number]}", FILE) for number in OF_FILES),
    *(partial(kind, "boom") for kind in (ValueError, KeyError, RuntimeError, OSError, TimeoutError, AssertionError)),
    MemoryError,
    asyncio.CancelledError,
    partial(grpc.aio.AioRpcError, grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), "boom"),
    *(partial(kind, "boom") for kind in (redis.ConnectionError, redis.ResponseError, pa.ArrowInvalid, pa.ArrowIOError)),
]


pytestmark = pytest.mark.usefixtures("brief_news")


@dataclass
class Fault:
    """Raises its error in a part of the coordinator once the trainer has begun its second step."""

    cause: Callable[[], BaseException]
    armed: bool = field(default=False, init=False)
    raised: int = field(default=0, init=False)

    async def arm(self, step: int) -> None:
        self.armed = self.armed or step == 2

    def strike(self) -> None:
        if self.armed:
            self.raised += 1
            raise self.cause()


# By part: where it fails, and words of which the reason has one.
Place = tuple[Any, str]
PARTS: dict[str, tuple[Place, tuple[str, ...]]] = {
    "trainer client": ((Trainer, "train_step"), ("trainer",)),
    "replica client": ((Replica, "sampling"), ("rollout-", "generation")),
    "registry": ((Registry, "list"), ("weight sync", "generation", "trainer", "replica")),
    "lease": ((CoordinatorLease, "hold"), ("lease", "coordinator", "lead")),
    "rewards": ((ExactMatch, "score"), ("reward exact_match",)),
    "data": ((DataCursor, "take"), ("data",)),
    "generation": ((Rollouts, "generate"), ("generation",)),
    "weight sync": ((WeightSync, "publish"), ("weight sync",)),
    "checkpoint": ((writing, "mark_complete"), ("checkpoint step-0000000",)),
    "evaluation": ((Evaluator, "evaluate"), ("evaluation",)),
    "rows": ((MetricsFile, "append"), ("iteration",)),
    "state": ((RunState, "save"), ("iteration",)),
    "progress": ((Progress, "advance"), ("iteration",)),
    "samples": ((SampleSink, "take"), ()),  # ends no run
}
# In each part a RuntimeError, and in the slow tests each other error in some part.
CASES = [
    pytest.param(part, cause, id=f"{part}-{cause()!r:.40}", marks=() if cause is CAUSES[29] else (pytest.mark.slow,))
    for number, part in enumerate(PARTS)
    for place, cause in enumerate(CAUSES)
    if place % len(PARTS) == number or cause is CAUSES[29]
]


def fail_at(monkeypatch: pytest.MonkeyPatch, place: Place, fault: Fault) -> None:
    owner, name = place
    real = getattr(owner, name)
    if asyncio.iscoroutinefunction(real):

        async def failing(*args: Any, **options: Any) -> Any:
            fault.strike()
            return await real(*args, **options)

        monkeypatch.setattr(owner, name, failing)
    elif owner is Replica:

        @asynccontextmanager
        async def streaming(*args: Any, **options: Any) -> AsyncIterator[Any]:
            fault.strike()
            async with real(*args, **options) as stream:
                yield stream

        monkeypatch.setattr(owner, name, streaming)
    else:

        def called(*args: Any, **options: Any) -> Any:
            fault.strike()
            return real(*args, **options)

        monkeypatch.setattr(owner, name, called)


async def run_with(config: RunConfig, environment: ServiceEnvironment, fault: Fault, evaluate_every: int) -> int:
    run: dict[str, Any] = {"checkpoint_every": 1, "evaluate_every": evaluate_every, "missed_checkpoint_budget": 0}
    run |= {"full_disk_timeout_s": 0.5}
    sync = {"formation_timeout_s": 1, "lease_ttl_s": 1.0}
    config = with_settings(config, run=run, sync=sync, rollout={"rejoin_timeout_s": 0.5})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=fault.arm)):
        return await asyncio.wait_for(conduct(config, environment, resume=False, stop=asyncio.Event()), 60)


def lines(caplog: pytest.LogCaptureFixture) -> Iterator[dict[str, Any]]:
    for entry in caplog.records:
        if isinstance(entry.msg, dict) and entry.name.startswith(("coordinator", "servicekit", "weightsync")):
            yield dict(entry.msg)


@pytest.mark.parametrize(("part", "cause"), CASES)
async def test_the_last_line_names_the_part_and_the_cause(
    config: RunConfig,
    environment: ServiceEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    cause: Callable[[], BaseException],
) -> None:
    place, words = PARTS[part]
    fault = Fault(cause)
    fail_at(monkeypatch, place, fault)
    with caplog.at_level(logging.INFO):
        code = await run_with(config, environment, fault, evaluate_every=1 if part == "evaluation" else 100)
    assert fault.raised
    if part == "samples" or code == 0:  # one that is waited out, or left out
        assert (code, len(rows(environment))) == (0, 6)
        return
    last = list(lines(caplog))[-1]
    error = cause()
    assert (last["message"], last["level"]) == ("run failed", "error")
    reason = last["error"]
    assert any(word in reason for word in words), reason
    if isinstance(error, asyncio.CancelledError):
        assert "cancelled" in reason
    elif isinstance(error, OSError) and error.filename:
        assert f"{FILE}: boom" in reason
    else:
        assert "boom" in reason or type(error).__name__ in reason
    assert "\n" not in reason
    assert saved_state(environment)["error"] in (reason, "")  # of a run that is another coordinator's


@pytest.fixture
def read_only(environment: ServiceEnvironment) -> Iterator[Callable[[], None]]:
    """Makes the run's folder read-only."""
    folder = str(environment.run_dir)
    done = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted: {done.stderr.strip()}")

    mounts = [folder]

    def change() -> None:
        # Above it: a mount on which a file is open, as that of the ledger, cannot be made read-only by hand.
        for _ in range(20):  # between the two commands a file may be opened on the new one, too
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            mounts.append(folder)
            if subprocess.run(["mount", "-o", "remount,ro,bind", folder], capture_output=True).returncode == 0:
                return
        raise RuntimeError(f"{folder} cannot be made read-only")

    yield change
    for mounted in mounts:
        subprocess.run(["umount", "--lazy", mounted], check=True)


@pytest.mark.parametrize("checkpoint_every", [100, 3])
async def test_a_folder_that_becomes_read_only_is_named_by_its_first_error(
    config: RunConfig,
    environment: ServiceEnvironment,
    caplog: pytest.LogCaptureFixture,
    read_only: Callable[[], None],
    checkpoint_every: int,
) -> None:
    async def at(step: int) -> None:
        if step == 3:
            read_only()

    config = with_settings(config, run={"checkpoint_every": checkpoint_every, "evaluate_every": 100})
    with caplog.at_level(logging.INFO):
        async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(before_step=at)):
            assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    said = list(lines(caplog))
    assert said[-1]["message"] == "run failed"
    assert said[-1]["error"] == (
        f"iteration 3: cannot write {environment.run_dir}/metrics.jsonl: Read-only file system "
        "(mount it for writing, then resume)"
    )
    assert not any("exc_info" in line for line in said)
    assert not any(".tmp" in str(line) for line in said)
