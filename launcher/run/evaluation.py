"""Runs `tandem evaluate` on this machine: Redis, replicas with the model's own weights, and the evaluator."""

import asyncio
import secrets
from signal import Signals

from launcher.run.devices import plan_devices
from launcher.run.outcome import LaunchOutcome
from launcher.run.processes import EVALUATOR, Launch, plan_evaluation
from launcher.run.run import RunRequest
from launcher.run.starting import StopSignals, start_redis, start_services, stop_services
from launcher.run.supervisor import Supervisor
from launcher.view.run_view import RunView
from servicekit.cuda import find_gpus
from servicekit.errors import TandemError
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK
from servicekit.lifecycle.tasks import cancel, end_of, first_of
from tandem_files.run_folder import make_token, note_launch


def launch_evaluation(request: RunRequest, view: RunView) -> LaunchOutcome:
    """Start all processes, wait for the results, and end them; none is left when this returns."""
    return asyncio.run(_launch(request, view))


async def _launch(request: RunRequest, view: RunView) -> LaunchOutcome:
    supervisor = Supervisor()
    with StopSignals(on_second=supervisor.kill) as signals:
        drive = asyncio.create_task(_drive(request, supervisor, view), name="drive")
        try:
            first = await first_of({"drive": end_of(drive), "signal": signals.wait()})
        finally:
            await cancel(drive)
            await stop_services(supervisor, view)
    if first.name == "drive":
        return drive.result()
    number = Signals(first.value)
    return LaunchOutcome(code=128 + number, text=f"stopped by {number.name}: nothing was written")


async def _drive(request: RunRequest, supervisor: Supervisor, view: RunView) -> LaunchOutcome:
    """Start everything, and wait for the first process that ends: the evaluator, or one that it needs."""
    launch_id = f"{request.run_dir.name}-{secrets.token_hex(4)}"
    try:
        note_launch(request.run_dir, launch_id)
        make_token(request.run_dir)
        redis_url = await start_redis(request.redis_url, request.run_dir, supervisor, view)
        launch = Launch(run_id=launch_id, run_dir=request.run_dir, redis_url=redis_url, resume=False)
        devices = plan_devices(request.config, find_gpus().usable, trainer_ranks=0)
        await start_services(plan_evaluation(request.config, launch, devices), request.run_dir, supervisor, view)
    except (TandemError, OSError) as error:
        return LaunchOutcome(code=EXIT_FAILED, text=f"failed: {error}; logs: {request.run_dir / 'logs'}")
    view.doing("evaluating")
    ended = await supervisor.wait_any()
    if ended.name == EVALUATOR and ended.code == EXIT_OK:
        return LaunchOutcome(code=EXIT_OK, text=f"finished; results are in {request.run_dir}")
    return LaunchOutcome(code=EXIT_FAILED, text=f"failed: {ended.describe()}; log: {ended.log}")
