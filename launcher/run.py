"""Runs a checked configuration on this machine from start to end: `launch` is the story in one function."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher import outcome, redis_server
from launcher.devices import DevicePlan, plan_devices, visible_gpus
from launcher.follow import follow
from launcher.outcome import Outcome
from launcher.plan_processes import COORDINATOR, Launch, plan_processes
from launcher.restarts import Restarts, to_restart
from launcher.run_folder import RESOLVED_CONFIG, LauncherNotes, read_notes, write_notes
from launcher.stop_signals import StopSignals
from launcher.supervisor import ProcessExit, ProcessSpec, Supervisor
from launcher.view import RunView
from servicekit.errors import TandemError
from tandem_config.schema import RunConfig

# How long the last events may take to arrive after the coordinator has ended.
_LAST_EVENTS_S = 3.0
# When the coordinator reports a failure, the service that caused it has ended just before or ends just after.
_CULPRIT_WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run, where. The folder is locked and holds the resolved file.

    redis_url: None: start a server. plan: which processes a run is made of.
    """

    config: RunConfig
    run_dir: Path
    redis_url: str | None
    resume: bool
    plan: Callable[[RunConfig, Launch, DevicePlan], list[ProcessSpec]] = plan_processes


def launch(request: RunRequest, view: RunView) -> Outcome:
    """Start everything, show it until it ends, end everything. Nothing is left running when this returns."""
    return asyncio.run(_launch(request, view))


async def _launch(request: RunRequest, view: RunView) -> Outcome:
    supervisor = Supervisor()
    with StopSignals(on_second=supervisor.kill) as signals:
        drive = asyncio.create_task(_drive(request, supervisor, view), name="drive")
        stop = asyncio.create_task(signals.wait(), name="signal")
        try:
            await asyncio.wait([drive, stop], return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not drive.done():
                view.say(f"{stop.result().name}: stopping everything; once more to kill at once", "yellow")
                return outcome.stopped(request.run_dir, stop.result())
            return drive.result()
        finally:
            stop.cancel()
            drive.cancel()
            await asyncio.gather(drive, stop, return_exceptions=True)
            view.doing("stopping services")
            for ended in await supervisor.stop():
                view.warning(f"{ended.name} did not end when asked to and was killed; its log: {ended.log}")
            view.close()


async def _drive(request: RunRequest, supervisor: Supervisor, view: RunView) -> Outcome:
    """From nothing to the end of the run, or to the first process whose end the run does not outlive."""
    launch_id = f"{request.run_dir.name}-{secrets.token_hex(4)}"
    try:
        redis_url = request.redis_url or await _start_redis(request, supervisor, view)
        await _start_services(request, launch_id, redis_url, supervisor, view)
        restarts = Restarts(request.run_dir, request.config.run.trainer_restarts)
        while True:
            culprit = await _watched_end(request, launch_id, redis_url, supervisor, view)
            if culprit is None:
                return outcome.ended(request.run_dir)
            goes_on = restarts.outlives(culprit)
            if not goes_on:
                return outcome.failed(request.run_dir, culprit)
            view.warning(goes_on)
            await supervisor.replace(to_restart(_planned(request, launch_id, redis_url, resume=True)))
    except (TandemError, OSError) as error:
        return outcome.broken(request.run_dir, error)


async def _watched_end(
    request: RunRequest, launch_id: str, redis_url: str, supervisor: Supervisor, view: RunView
) -> ProcessExit | None:
    """Shows the run until it ends. Returns: the process that ended too early, or failed; None: the run is over."""
    watch = asyncio.create_task(_watch(request, launch_id, redis_url, view), name="watch the run")
    try:
        first = await supervisor.wait_any()
        if first.name == COORDINATOR and first.code == 0:
            notes = read_notes(request.run_dir)
            if notes is not None and notes.coordinator:
                await asyncio.wait([watch], timeout=_LAST_EVENTS_S)
            return None
        return await _culprit(first, supervisor)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _start_redis(request: RunRequest, supervisor: Supervisor, view: RunView) -> str:
    view.doing("starting Redis")
    spec, url = redis_server.server_spec(request.run_dir / "logs" / "redis.log")
    await supervisor.start(spec)
    await redis_server.wait_ready(url, supervisor)
    return url


async def _start_services(
    request: RunRequest, launch_id: str, redis_url: str, supervisor: Supervisor, view: RunView
) -> None:
    specs = _planned(request, launch_id, redis_url, resume=request.resume)
    view.say(f"starting {', '.join(spec.name for spec in specs)}; logs in {request.run_dir / 'logs'}")
    for spec in specs:
        await supervisor.start(spec)


def _planned(request: RunRequest, launch_id: str, redis_url: str, *, resume: bool) -> list[ProcessSpec]:
    shared = Launch(
        run_id=launch_id,
        run_dir=request.run_dir,
        config_file=request.run_dir / RESOLVED_CONFIG,
        redis_url=redis_url,
        resume=resume,
    )
    return request.plan(request.config, shared, plan_devices(request.config, visible_gpus()))


async def _watch(request: RunRequest, launch_id: str, redis_url: str, view: RunView) -> None:
    """The view is not worth a run: whatever goes wrong with it is said, and the run goes on."""
    roles = {
        "trainer": ["trainer"],
        "rollout": [f"rollout-{index}" for index in range(request.config.rollout.replicas)],
        COORDINATOR: [COORDINATOR],
    }
    notes = LauncherNotes(pid=os.getpid(), run_id=launch_id, started_unix_s=time.time())

    def note_address(address: str) -> None:
        write_notes(request.run_dir, LauncherNotes(**{**vars(notes), "coordinator": address}))

    write_notes(request.run_dir, notes)
    try:
        await follow(redis_url, launch_id, roles, view, note_address)
    except Exception as error:
        view.warning(f"the progress view ended ({error}); the run goes on, see {request.run_dir / 'metrics.jsonl'}")


async def _culprit(first: ProcessExit, supervisor: Supervisor) -> ProcessExit:
    """The process that ended first, unless the coordinator merely reported the end of another one."""
    if first.name != COORDINATOR:
        return first
    try:
        async with asyncio.timeout(_CULPRIT_WINDOW_S):
            return await supervisor.wait_any(ignore=[COORDINATOR])
    except TimeoutError:
        return first
