"""Sinks get every iteration in order; one that fails or blocks is warned of and harms nothing."""

import asyncio
import threading
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from coordinator.record import sinks as module
from coordinator.record.sinks import MAX_WAITING, FinishedIteration, Sinks
from servicekit.errors import ERRORS


@dataclass
class FakeSink:
    """Keeps the iterations that it gets; may fail or block."""

    name: str = "fake"
    fail_at: int = -1
    blocked: threading.Event | None = None
    got: list[int] = field(default_factory=list)
    closed: bool = False

    def take(self, finished: FinishedIteration) -> None:
        number = int(finished.row["iteration"] or 0)
        if self.blocked is not None:
            self.blocked.wait(30)
        if number == self.fail_at:
            raise OSError("no space left")
        self.got.append(number)

    def close(self) -> None:
        self.closed = True


def finished(number: int) -> FinishedIteration:
    return FinishedIteration(record=None, row={"iteration": number})


async def test_every_sink_gets_every_iteration_in_order_and_is_closed() -> None:
    one, two, warnings = FakeSink(), FakeSink(), list[str]()
    sinks = Sinks([one, two], warnings.append)
    for number in range(3):
        sinks.take(finished(number))
    await sinks.close()
    await sinks.close()
    assert [one.got, two.got] == [[0, 1, 2]] * 2
    assert [one.closed, two.closed] == [True, True]
    assert warnings == []


async def test_a_sink_that_fails_is_named_and_the_others_go_on() -> None:
    bad, good, warnings = FakeSink(name="wandb", fail_at=1), FakeSink(), list[str]()
    sinks = Sinks([bad, good], warnings.append)
    for number in range(4):
        sinks.take(finished(number))
    await sinks.close()
    assert [bad.got, good.got] == [[0], [0, 1, 2, 3]]
    assert warnings == ["wandb failed and is left out from now on: OSError: no space left"]


FAULTS: list[BaseException] = [
    *(kind("boom") for kind in ERRORS),
    OSError(28, "No space left on device", "f"),
    KeyError("x"),
    MemoryError(),
]
FAULTS += [
    ValueError(),
    RuntimeError("x"),
    pa.ArrowInvalid("x"),
    TimeoutError(),
    asyncio.CancelledError(),
    SystemExit(3),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault!r:.40}")
@pytest.mark.parametrize("when", ["take", "close"])
async def test_nothing_that_a_sink_raises_leaves_it(fault: BaseException, when: str) -> None:
    def fails(*_: object) -> None:
        raise fault

    bad, good, warnings = FakeSink(name="mlflow"), FakeSink(), list[str]()
    setattr(bad, when, fails)
    sinks = Sinks([bad, good], warnings.append)
    for number in range(3):
        sinks.take(finished(number))
    await sinks.close()
    assert (good.got, good.closed) == ([0, 1, 2], True)
    (warning,) = warnings
    assert warning.startswith(f"mlflow failed and is left out from now on: {type(fault).__name__}")


async def test_a_sink_that_blocks_delays_neither_iterations_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    stuck, warnings = FakeSink(name="mlflow", blocked=threading.Event()), list[str]()
    sinks = Sinks([stuck], warnings.append)
    for number in range(MAX_WAITING + 4):
        sinks.take(finished(number))
    await sinks.close()
    assert stuck.blocked is not None
    stuck.blocked.set()
    assert warnings == [
        f"mlflow is more than {MAX_WAITING} iterations late: it misses some",
        "mlflow did not finish in time: its last iterations may be missing",
    ]


async def test_warnings_come_in_the_thread_of_the_event_loop() -> None:
    """What they call, the log of events, belongs to the loop."""
    threads: list[int] = []
    sinks = Sinks([FakeSink(fail_at=0)], lambda _: threads.append(threading.get_ident()))
    sinks.take(finished(0))
    await sinks.close()
    assert threads == [threading.get_ident()]
