"""Runs a checked configuration on this machine from start to end: `launch` is the story in one function."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals

from launcher.run import outcome, redis_server
from launcher.run.devices import DevicePlan, plan_devices, visible_gpus
from launcher.run.outcome import LaunchOutcome
from launcher.run.processes import Launch, plan_processes
from launcher.run.restarts import Restarts
from launcher.run.stop_signals import StopSignals
from launcher.run.supervisor import ProcessExit, ProcessSpec, Supervisor
from launcher.view.run_view import RunView
from launcher.view.watching import Watching
from servicekit.errors import TandemError
from servicekit.life.tasks import cancel, end_of, first_of
from servicekit.redis.records import COORDINATOR
from tandem_config.schema import RunConfig
from tandem_files.run_config import LAUNCHED_CONFIG, NEXT_CONFIG
from tandem_files.run_folder import make_token, read_token

# When the coordinator reports a failure, the service that caused it has ended just before or ends just after.
_CULPRIT_WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run, where. The folder is locked and holds the configuration's files (tandem_files/run_config.py).

    redis_url: None: start a server. plan: which processes a run is made of.
    """

    config: RunConfig
    run_dir: Path
    redis_url: str | None
    resume: bool
    plan: Callable[[RunConfig, Launch, DevicePlan], list[ProcessSpec]] = plan_processes


def launch(request: RunRequest, view: RunView) -> LaunchOutcome:
    """Start everything, show it until it ends, end everything. Nothing is left running when this returns."""
    return asyncio.run(_launch(request, view))


async def _launch(request: RunRequest, view: RunView) -> LaunchOutcome:
    supervisor = Supervisor()
    stopped_by: Signals | None = None
    with StopSignals(on_second=supervisor.kill) as signals:
        drive = asyncio.create_task(_drive(request, supervisor, view), name="drive")
        try:
            first = await first_of({"drive": end_of(drive), "signal": signals.wait()})
            if first.name == "signal":
                stopped_by = Signals(first.value)
                view.say(f"{stopped_by.name}: saving and stopping everything; once more to kill at once", "yellow")
        finally:
            await cancel(drive)
            view.doing("stopping services")
            for ended in await supervisor.stop():
                view.warning(f"{ended.name} did not end when asked to and was killed; its log: {ended.log}")
            view.close()
    # Only now: a run that is stopped leaves a checkpoint.
    result = drive.result() if stopped_by is None else outcome.stopped(request.run_dir, stopped_by)
    return _with_configuration_kept(request.run_dir, result)


def _with_configuration_kept(run_dir: Path, result: LaunchOutcome) -> LaunchOutcome:
    """A resumed run that has not trained an iteration keeps its configuration, whatever this launch had changed."""
    if not (run_dir / NEXT_CONFIG).exists():
        return result
    (run_dir / NEXT_CONFIG).unlink()
    return replace(result, text=f"{result.text}; the run's configuration is what it was before")


async def _drive(request: RunRequest, supervisor: Supervisor, view: RunView) -> LaunchOutcome:
    """From nothing to the end of the run, or to the first death that the run does not outlive."""
    launch_id = f"{request.run_dir.name}-{secrets.token_hex(4)}"
    try:
        make_token(request.run_dir)
        redis_url = request.redis_url or await _start_redis(request, supervisor, view)
        await _start_services(request, launch_id, redis_url, supervisor, view)
        watching = Watching(request.config, request.run_dir, launch_id, redis_url, view)
        try:
            return await _outlive(request, launch_id, redis_url, supervisor, view, watching)
        finally:
            await watching.drop()
    except (TandemError, OSError) as error:
        return outcome.broken(request.run_dir, error)


async def _outlive(
    request: RunRequest, launch_id: str, redis_url: str, supervisor: Supervisor, view: RunView, watching: Watching
) -> LaunchOutcome:
    """Start again what dies, as long as restarts.py says so."""
    planned = _planned(request, launch_id, redis_url, resume=True)
    restarts = Restarts(request.run_dir, request.config, [spec.name for spec in planned])
    await watching.begin()
    while True:
        death = await _next_death(supervisor, ignore=sorted(restarts.left_out))
        if death.name == COORDINATOR and death.code == 0:
            await watching.end()
            return outcome.ended(request.run_dir)
        restart = restarts.after(death)
        if restart is None:
            return outcome.failed(request.run_dir, death)
        view.warning(restart.text)
        await supervisor.replace(restart.specs(planned))
        if COORDINATOR in restart.names:
            await watching.begin()


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
        config_file=request.run_dir / LAUNCHED_CONFIG,
        redis_url=redis_url,
        resume=resume,
        token=read_token(request.run_dir),
    )
    return request.plan(request.config, shared, plan_devices(request.config, visible_gpus()))


async def _next_death(supervisor: Supervisor, ignore: Sequence[str]) -> ProcessExit:
    """The process that ended first; not the coordinator if it has failed because another one ended."""
    first = await supervisor.wait_any(ignore=ignore)
    if first.name != COORDINATOR or first.code == 0:
        return first
    try:
        async with asyncio.timeout(_CULPRIT_WINDOW_S):
            return await supervisor.wait_any(ignore=[COORDINATOR, *ignore])
    except TimeoutError:
        return first
