"""Runs `tandem evaluate` on this machine: Redis, replicas with the model's own weights, and the evaluator."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from launcher.run import redis_server
from launcher.run.devices import plan_devices, visible_gpus
from launcher.run.outcome import LaunchOutcome
from launcher.run.processes import EVALUATOR, Launch, plan_evaluation
from launcher.run.stop_signals import StopSignals
from launcher.run.supervisor import Supervisor
from launcher.view.run_view import RunView
from servicekit.errors import TandemError
from servicekit.life.exit_codes import EXIT_FAILED, EXIT_OK
from servicekit.life.tasks import cancel, end_of, first_of
from tandem_config.schema import RunConfig
from tandem_files.run_config import LAUNCHED_CONFIG
from tandem_files.run_folder import make_token, read_token


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """An evaluation to launch; its folder is locked and holds the configuration.

    Attributes:
        redis_url: None: start a server.
    """

    config: RunConfig
    run_dir: Path
    redis_url: str | None


def launch_evaluation(request: EvaluationRequest, view: RunView) -> LaunchOutcome:
    """Start all processes, wait for the results, and end them; none is left when this returns."""
    return asyncio.run(_launch(request, view))


async def _launch(request: EvaluationRequest, view: RunView) -> LaunchOutcome:
    supervisor = Supervisor()
    with StopSignals(on_second=supervisor.kill) as signals:
        drive = asyncio.create_task(_drive(request, supervisor, view), name="drive")
        try:
            first = await first_of({"drive": end_of(drive), "signal": signals.wait()})
        finally:
            await cancel(drive)
            view.doing("stopping services")
            for ended in await supervisor.stop():
                view.warning(f"{ended.name} did not end on SIGTERM and was killed; log: {ended.log}")
            view.close()
    if first.name == "drive":
        return drive.result()
    number = Signals(first.value)
    return LaunchOutcome(code=128 + number, text=f"stopped by {number.name}: nothing was written")


async def _drive(request: EvaluationRequest, supervisor: Supervisor, view: RunView) -> LaunchOutcome:
    """Start everything, and wait for the first process that ends: the evaluator, or one that it needs."""
    try:
        await _start(request, supervisor, view)
    except (TandemError, OSError) as error:
        return LaunchOutcome(code=EXIT_FAILED, text=f"failed: {error}; logs: {request.run_dir / 'logs'}")
    view.doing("evaluating")
    ended = await supervisor.wait_any()
    if ended.name == EVALUATOR and ended.code == EXIT_OK:
        return LaunchOutcome(code=EXIT_OK, text=f"finished; results are in {request.run_dir}")
    return LaunchOutcome(code=EXIT_FAILED, text=f"failed: {ended.describe()}; log: {ended.log}")


async def _start(request: EvaluationRequest, supervisor: Supervisor, view: RunView) -> None:
    """Start Redis, the replicas and the evaluator. Raises: TandemError, OSError: one cannot be started."""
    make_token(request.run_dir)
    redis_url = request.redis_url
    if redis_url is None:
        view.doing("starting Redis")
        spec, redis_url = redis_server.server_spec(request.run_dir / "logs" / "redis.log")
        await supervisor.start(spec)
        await redis_server.wait_ready(redis_url, supervisor)
    launch = Launch(
        run_id=f"{request.run_dir.name}-{secrets.token_hex(4)}",
        run_dir=request.run_dir,
        config_file=request.run_dir / LAUNCHED_CONFIG,
        redis_url=redis_url,
        resume=False,
        token=read_token(request.run_dir),
    )
    devices = plan_devices(request.config, visible_gpus(), trainer_ranks=0)
    specs = plan_evaluation(request.config, launch, devices)
    view.print_line(f"starting {', '.join(spec.name for spec in specs)}; logs in {request.run_dir / 'logs'}")
    for spec in specs:
        await supervisor.start(spec)
