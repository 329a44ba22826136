"""CoordinatorService over real gRPC while a run is on: status, events, pause, resume, stop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import StringIO

import grpc
import pytest
from rich.console import Console

from coordinator.app import conduct
from launcher.run import outcome
from launcher.view.status import describe
from launcher.view.top import overview_at, show
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, Unavailable
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.kit.waiting import until

DEADLINE_S = 60.0


class Watched:
    """A run in the background with a client of its coordinator."""

    def __init__(
        self, stub: coordinator_pb2_grpc.CoordinatorServiceStub, fleet: FakeFleet, code: "asyncio.Task[int]"
    ) -> None:
        self.stub = stub
        self.fleet = fleet
        self.code = code

    async def status(self) -> pb.GetStatusResponse:
        status: pb.GetStatusResponse = await self.stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)
        return status

    async def events(self, after: int = 0) -> AsyncIterator[pb.WatchEventsResponse]:
        request = pb.WatchEventsRequest(after_sequence=after)
        async for event in self.stub.WatchEvents(request, timeout=DEADLINE_S):
            yield event

    async def until(self, wanted: Callable[[pb.WatchEventsResponse], bool]) -> pb.WatchEventsResponse:
        async for event in self.events():
            if wanted(event):
                return event
        raise AssertionError("the run ended without the event")


@asynccontextmanager
async def watched_run(config: RunConfig, environment: ServiceEnvironment) -> AsyncIterator[Watched]:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.rollout_services[0].hold.clear()
        code = asyncio.create_task(conduct(config, environment, resume=False, stop=asyncio.Event()))
        registry = await asyncio.to_thread(Registry, environment.redis_url, environment.run_id)
        record = (await asyncio.to_thread(registry.wait_for, "coordinator", ["coordinator"], DEADLINE_S))[0]
        async with open_channel(record.address) as channel:
            yield Watched(coordinator_pb2_grpc.CoordinatorServiceStub(channel), fleet, code)
        await asyncio.wait_for(code, DEADLINE_S)
        registry.close()


def is_iteration(number: int) -> Callable[[pb.WatchEventsResponse], bool]:
    return lambda event: event.kind == pb.EVENT_KIND_ITERATION and event.values["iteration"] == number


def is_state(text: str) -> Callable[[pb.WatchEventsResponse], bool]:
    return lambda event: event.kind == pb.EVENT_KIND_STATE and event.message.startswith(text)


async def test_watchers_see_everything_and_can_replay(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with watched_run(config, environment) as run:
        run.fleet.rollout_services[0].hold.set()
        events = [event async for event in run.events()]
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert [event.message for event in events if event.kind == pb.EVENT_KIND_STATE] == ["running", "finished"]
        iterations = [event for event in events if event.kind == pb.EVENT_KIND_ITERATION]
        assert [event.values["iteration"] for event in iterations] == [1, 2, 3, 4, 5, 6]
        table = rows(environment)
        assert dict(iterations[-1].values) == {name: v for name, v in table[-1].items() if v is not None}
        measured = [event.values["iteration"] for event in events if event.kind == pb.EVENT_KIND_EVALUATION]
        assert measured == [0, 2, 4, 6]
        parts = [event.message for event in events if event.kind == pb.EVENT_KIND_PROGRESS]
        assert parts[:5] == ["sync", "sync", "", "evaluate", ""], "what precedes the first sync is called so too"
        assert parts[5:-2:2] == [part for part in parts[5:-2] if part], "each part of an iteration ends"
        assert parts[6:-2:2] == [""] * ((len(parts) - 7) // 2)
        assert parts[-2:] == ["checkpoint", "export"]
    assert run.code.result() == 0


async def test_a_late_watcher_gets_what_it_has_missed(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with watched_run(config, environment) as run:
        run.fleet.rollout_services[0].hold.set()
        seen = await run.until(is_iteration(2))
        later = [event async for event in run.events(after=seen.sequence)]
        assert later[0].sequence == seen.sequence + 1
        assert later[-1].message == "finished"


async def test_watching_from_the_future_is_refused(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with watched_run(config, environment) as run:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in run.events(after=10_000)]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        run.fleet.rollout_services[0].hold.set()


async def test_pause_holds_before_the_next_iteration_and_resume_goes_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with watched_run(config, environment) as run:
        assert (await run.status()).state == pb.RUN_STATE_STARTING
        await run.stub.Pause(pb.PauseRequest(), timeout=DEADLINE_S)
        await run.stub.Pause(pb.PauseRequest(), timeout=DEADLINE_S)
        run.fleet.rollout_services[0].hold.set()
        await run.until(is_state("paused"))
        status = await run.status()
        assert (status.state, status.iteration, status.total_iterations) == (pb.RUN_STATE_PAUSED, 0, 6)
        response = await run.stub.Resume(pb.ResumeRequest(), timeout=DEADLINE_S)
        assert response.state == pb.RUN_STATE_RUNNING
        await run.until(is_state("finished"))
    assert len(rows(environment)) == 6


async def test_stop_after_step_ends_with_checkpoint_and_summary(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"iterations": 1_000_000})
    async with watched_run(config, environment) as run:
        run.fleet.rollout_services[0].hold.set()
        await run.until(is_iteration(1))
        await run.stub.StopAfterStep(pb.StopAfterStepRequest(), timeout=DEADLINE_S)
        await run.until(is_state("finished"))
    assert run.code.result() == 0
    done = len(rows(environment))
    assert done < 1000
    assert (environment.run_dir / "checkpoints" / f"step-{done:08d}" / "complete.json").exists()
    assert (environment.run_dir / "summary.json").exists()


async def test_a_held_run_can_be_stopped(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with watched_run(config, environment) as run:
        await run.stub.Pause(pb.PauseRequest(), timeout=DEADLINE_S)
        run.fleet.rollout_services[0].hold.set()
        await run.until(is_state("paused"))
        await run.stub.StopAfterStep(pb.StopAfterStepRequest(), timeout=DEADLINE_S)
        await run.until(is_state("finished"))
    assert saved_state(environment)["iteration"] == 0


async def test_a_log_prob_difference_above_its_limit_is_a_warning(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with watched_run(config, environment) as run:
        run.fleet.trainer_service.logprob_diff = 3e-3
        run.fleet.rollout_services[0].hold.set()
        event = await run.until(lambda event: event.kind == pb.EVENT_KIND_WARNING)
        assert "differ by 0.003 for some token (limit 0.0001); see grpo.logprob_diff_limit" in event.message
        await run.until(is_state("finished"))
    assert saved_state(environment)["totals"]["warnings"] >= 6


@pytest.mark.parametrize(("difference", "ends"), [(0.4, "finished"), (0.6, "failed")])
async def test_a_mean_difference_of_another_model_ends_the_run(
    config: RunConfig, environment: ServiceEnvironment, difference: float, ends: str
) -> None:
    async with watched_run(config, environment) as run:
        run.fleet.trainer_service.logprob_diff = difference  # the largest; the mean is half of it
        run.fleet.rollout_services[0].hold.set()
        await run.until(is_state(ends))
    state = saved_state(environment)
    assert state["status"] == ends
    assert state["iteration"] == (6 if ends == "finished" else 0)
    if ends == "failed":
        assert "differ by 0.3 nats on average" in state["error"]
        assert "grpo.logprob_diff_stop = 0.25" in state["error"]
        assert not (environment.run_dir / "checkpoints").exists()


async def test_a_run_that_cannot_learn_is_told_while_it_runs_and_afterwards(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    never = with_settings(config, reward={"kind": "regex", "pattern": "never (matches)", "workers": 1})
    async with watched_run(never, environment) as run:
        run.fleet.rollout_services[0].hold.set()
        event = await run.until(lambda event: event.kind == pb.EVENT_KIND_WARNING)
        assert "iteration 2: Every completion of the last 2 iterations got the reward 0" in event.message
        status = await run.stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)
        assert any("got the reward 0" in text for text in status.troubles)
        await run.until(is_state("finished"))
    summary = json.loads((environment.run_dir / "summary.json").read_text())
    assert summary["troubles"] == saved_state(environment)["troubles"] != []
    last = outcome.ended(environment.run_dir)
    assert last.code == 0
    assert last.text.startswith("finished, but look at the training: Every completion of the last 2 iterations got the")
    (environment.run_dir / "config.resolved.yaml").touch()  # the launcher's
    assert ("trouble", summary["troubles"][0]) in describe(environment.run_dir, {})


async def test_top_draws_a_run_until_its_end(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", environment.redis_url)
    monkeypatch.setenv("TANDEM_RUN_ID", environment.run_id)
    monkeypatch.setenv("TANDEM_RUN_DIR", str(environment.run_dir))
    monkeypatch.setenv("TERM", "xterm")
    said, shown = StringIO(), StringIO()
    once, live = (
        Console(file=file, width=160, force_terminal=terminal) for file, terminal in ((said, False), (shown, True))
    )
    async with watched_run(config, environment) as run:
        await asyncio.to_thread(show, environment.run_dir, once, once=True)
        watching = asyncio.create_task(asyncio.to_thread(show, environment.run_dir, live, once=False))
        await asyncio.to_thread(until, lambda: "starting" in shown.getvalue())
        assert not watching.done()
        run.fleet.rollout_services[0].hold.set()
        await asyncio.wait_for(watching, DEADLINE_S)
    assert said.getvalue().startswith(f"{config.run.name}  starting  iteration 0 of 6, policy version 0\n")
    assert "\x1b" not in said.getvalue()
    assert "finished" in shown.getvalue().rpartition("\x1b[?1049l")[2]


async def test_top_names_what_it_does_not_find(environment: ServiceEnvironment) -> None:
    with pytest.raises(Unavailable, match=r"the coordinator at 127\.0\.0\.1:1"):
        await overview_at("127.0.0.1:1", "")
    with pytest.raises(ConfigError, match="is not a run's folder"):
        await asyncio.to_thread(show, environment.run_dir / "no-such-run", Console(file=StringIO()), once=True)
