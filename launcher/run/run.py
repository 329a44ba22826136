"""Runs a checked configuration on this machine, from the start of its processes to the outcome: see `launch`."""

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals

from launcher.run import outcome
from launcher.run.devices import DevicePlan, plan_devices
from launcher.run.outcome import LaunchOutcome
from launcher.run.processes import Launch, plan_processes
from launcher.run.restarts import Restarts
from launcher.run.scaling import Scaling, why_not_here
from launcher.run.starting import Probes, StopSignals, start_redis, start_services, stop_services
from launcher.run.supervisor import ProcessExit, ProcessSpec, Supervisor
from launcher.view.follow import ViewTask
from launcher.view.run_view import RunView
from servicekit.cuda import find_gpus
from servicekit.errors import TandemError
from servicekit.lifecycle.tasks import cancel, end_of, first_of
from servicekit.redis.records import COORDINATOR
from servicekit.redis.registry import Registry
from tandem_config.schema import RunConfig
from tandem_files.run_config import NEXT_CONFIG
from tandem_files.run_folder import Scale, make_token, note_launch, read_state, read_token, write_scale
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

WORKER_ID = "TANDEM_WORKER_ID"
# A service whose end makes the coordinator fail may be seen to end this much later than the coordinator.
_CULPRIT_WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to launch; its folder is locked and holds the configuration files (tandem_files/run_config.py).

    Attributes:
        redis_url: None: start a server.
        resume: from the newest checkpoint.
        scale: of a resume: as many replicas as `config` has, and how many its files have; None: as many.
        plan: plans the processes of the run.
    """

    config: RunConfig
    run_dir: Path
    redis_url: str | None
    resume: bool
    scale: Scale | None = None
    plan: Callable[[RunConfig, Launch, DevicePlan], list[ProcessSpec]] = plan_processes


def launch(request: RunRequest, view: RunView) -> LaunchOutcome:
    """Start all processes, show the run in `view` until it ends, and end them; none is left when this returns."""
    return asyncio.run(_launch(request, view))


async def _launch(request: RunRequest, view: RunView) -> LaunchOutcome:
    supervisor, before = Supervisor(), read_state(request.run_dir)
    stopped_by: Signals | None = None
    with StopSignals(on_second=supervisor.kill) as signals:
        drive = asyncio.create_task(_drive(request, supervisor, view), name="drive")
        try:
            first = await first_of({"drive": end_of(drive), "signal": signals.wait()})
            if first.name == "signal":
                stopped_by = Signals(first.value)
                view.print_line(f"{stopped_by.name}: saving and stopping everything; send it again to kill", "yellow")
        finally:
            await cancel(drive)
            await stop_services(supervisor, view)
    # Only now: the coordinator of a stopped run has written its checkpoint.
    result = drive.result() if stopped_by is None else outcome.stopped(request.run_dir, stopped_by, before)
    return _with_configuration_kept(request.run_dir, result)


def _with_configuration_kept(run_dir: Path, result: LaunchOutcome) -> LaunchOutcome:
    """Discard the configuration of a resumed launch that has not trained an iteration: the run keeps its own."""
    if not (run_dir / NEXT_CONFIG).exists():
        return result
    (run_dir / NEXT_CONFIG).unlink()
    return replace(result, text=f"{result.text}; the run's configuration is what it was before")


async def _drive(request: RunRequest, supervisor: Supervisor, view: RunView) -> LaunchOutcome:
    """Start the services and follow the run to its end, or to the first death that ends it."""
    launch_id = f"{request.run_dir.name}-{secrets.token_hex(4)}"
    try:
        note_launch(request.run_dir, launch_id)
        make_token(request.run_dir)
        replicas = request.config.rollout.replicas
        scale = replace(request.scale or Scale(replicas=replicas, configured=replicas), launch_id=launch_id)
        write_scale(request.run_dir, scale)
        redis_url = await start_redis(request.redis_url, request.run_dir, supervisor, view)
        gpus = find_gpus().usable
        specs = _named(_planned(request, launch_id, redis_url, gpus, scale.replicas, resume=request.resume))
        await start_services(specs, request.run_dir, supervisor, view)
        view_task = ViewTask(request.config, request.run_dir, launch_id, redis_url, view)
        probing = Probes(partial(Registry, redis_url, launch_id), supervisor, read_token(request.run_dir), view)
        probes = asyncio.create_task(probing.run(), name="probe services")
        try:
            restarts = Restarts(request.run_dir, request.config, [spec.name for spec in specs])
            # On the CPU it stays there, also when fewer replicas would fit the GPUs.
            gpus = gpus if plan_devices(request.config, gpus).on_gpus else ()
            scaling = Scaling(
                request.run_dir,
                scale,
                supervisor,
                restarts,
                plan=partial(_planned, request, launch_id, redis_url, gpus, resume=True),
                why_not=partial(why_not_here, request.config, gpus, supervisor),
                say=view.print_line,
            )
            give_lead_up = partial(_give_lead_up, redis_url, launch_id, view=view)
            return await _restart_until_end(request, supervisor, restarts, scaling, view, view_task, give_lead_up)
        finally:
            await cancel(probes)
            await view_task.cancel()
    except (TandemError, OSError) as error:
        return outcome.broken(request.run_dir, error)


async def _restart_until_end(
    request: RunRequest,
    supervisor: Supervisor,
    restarts: Restarts,
    scaling: Scaling,
    view: RunView,
    view_task: ViewTask,
    give_lead_up: Callable[[str], Awaitable[None]],
) -> LaunchOutcome:
    """Restart processes that die, as restarts.py decides, and scale as is asked (scaling.py), until the run ends."""
    await view_task.begin()
    while True:
        ignore = sorted({*restarts.left_out, *scaling.leaving})
        first = await first_of({"death": _next_death(supervisor, ignore), "scale": scaling.wait()})
        if first.name == "scale":
            await scaling.follow()
            view_task.expect(scaling.replicas)
            continue
        death: ProcessExit = first.value
        if death.name == COORDINATOR:
            await give_lead_up(supervisor.variable(COORDINATOR, WORKER_ID))
        if death.name == COORDINATOR and death.code == 0:
            await view_task.finish()
            return outcome.ended(request.run_dir)
        restart = restarts.after(death)
        if restart is None:
            return outcome.failed(request.run_dir, death)
        view.warning(restart.text)
        await supervisor.replace(_named(restart.specs(scaling.planned)))
        if COORDINATOR in restart.names:
            await view_task.begin()


def _planned(
    request: RunRequest, launch_id: str, redis_url: str, gpus: Sequence[str], replicas: int, *, resume: bool
) -> list[ProcessSpec]:
    config = request.config.changed("rollout", replicas=replicas)
    launch = Launch(run_id=launch_id, run_dir=request.run_dir, redis_url=redis_url, resume=resume)
    return request.plan(config, launch, plan_devices(config, gpus))


def _named(specs: list[ProcessSpec]) -> list[ProcessSpec]:
    """Give the coordinator a name of its own for this start, under which it leads."""
    mine = {WORKER_ID: uuid.uuid4().hex}
    return [replace(spec, env={**spec.env, **mine}) if spec.name == COORDINATOR else spec for spec in specs]


async def _give_lead_up(redis_url: str, run_id: str, worker_id: str, view: RunView) -> None:
    """Give the lead up in place of a process that has ended: its successor need not wait for the end of its lease.

    Args:
        worker_id: that process's alone: the lead of any other stays.
    """
    try:
        group = await asyncio.to_thread(Rendezvous, redis_url, f"tandem:{run_id}")
        await asyncio.to_thread(group.leave, COORDINATOR_SLOT, worker_id)
    except TandemError as error:
        view.warning(f"the next coordinator waits for the lease of the one that has ended: {error}")


async def _next_death(supervisor: Supervisor, ignore: Sequence[str]) -> ProcessExit:
    """Wait for the first process that ends; if the coordinator failed because of another one, return that one."""
    first = await supervisor.wait_any(ignore=ignore)
    if first.name != COORDINATOR or first.code == 0:
        return first
    try:
        async with asyncio.timeout(_CULPRIT_WINDOW_S):
            return await supervisor.wait_any(ignore=[COORDINATOR, *ignore])
    except TimeoutError:
        return first
