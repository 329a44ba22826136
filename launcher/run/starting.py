"""How processes start and end on this machine, with a line for the user: the same for a run and for an evaluation.

Ctrl-C, SIGTERM and SIGHUP of the launcher: the first stops the run, the second kills it. Services of a run that are
frozen are killed too.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.run import redis_server
from launcher.run.supervisor import ProcessSpec, Supervisor
from launcher.view.run_view import RunView
from servicekit.errors import TandemError
from servicekit.redis.records import COORDINATOR
from servicekit.redis.registry import Registry, listens
from servicekit.rpc.channel import open_channel
from servicekit.rpc.health import LIVENESS
from servicekit.security.tls import operator_identity

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# As the liveness probes of deploy/base: by role, the probes in a row without an answer after which a service is frozen.
# The coordinator sees to the trainer.
MISSES = {COORDINATOR: 6, "rollout": 12}
PROBE_EVERY_S, _ANSWER_S = 10.0, 5.0


async def start_redis(redis_url: str | None, run_dir: Path, supervisor: Supervisor, view: RunView) -> str:
    """Start a Redis server if there is none. Returns: its URL. Raises: TandemError, OSError: it cannot be started."""
    if redis_url is not None:
        return redis_url
    view.doing("starting Redis")
    spec, url = redis_server.server_spec(run_dir / "logs" / "redis.log")
    await supervisor.start(spec)
    await redis_server.wait_ready(url, supervisor)
    return url


async def start_services(specs: Sequence[ProcessSpec], run_dir: Path, supervisor: Supervisor, view: RunView) -> None:
    """Start processes. Raises: OSError: one cannot be started."""
    view.print_line(f"starting {', '.join(spec.name for spec in specs)}; logs in {run_dir / 'logs'}")
    for spec in specs:
        await supervisor.start(spec)


async def stop_services(supervisor: Supervisor, view: RunView) -> None:
    """End all processes, and close the view."""
    view.doing("stopping services")
    for ended in await supervisor.stop():
        view.warning(f"{ended.name} did not end on SIGTERM and was killed; log: {ended.log}")
    view.close()


class Probes:
    """Kills services that are frozen: no process has ended, so that nothing else would start them again.

    Args:
        open_registry: opens the run's; blocking.
        token: secret of the run.
    """

    def __init__(
        self, open_registry: Callable[[], Registry], supervisor: Supervisor, token: str, view: RunView
    ) -> None:
        self._open_registry, self._supervisor, self._token, self._view = open_registry, supervisor, token, view
        # By role and name: where it was announced last, and its probes in a row without an answer.
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    async def run(self) -> None:
        """Probe until cancelled; restarts.py decides what follows a death."""
        try:
            with contextlib.closing(await asyncio.to_thread(self._open_registry)) as registry:
                while True:
                    await asyncio.gather(self._look(registry), asyncio.sleep(PROBE_EVERY_S))
        except Exception as error:  # noqa: BLE001 - as of the view, a failure of the probes must not end the run
            self._view.warning(f"services that freeze are not noticed any more: {error}")

    async def _look(self, registry: Registry) -> None:
        with contextlib.suppress(TandemError):  # of Redis; a frozen service has no record any more anyway
            await self._note_addresses(registry)
        await asyncio.gather(*(self._probe(*key, *known) for key, known in self._known.items()))

    async def _note_addresses(self, registry: Registry) -> None:
        for role in MISSES:
            for record in await asyncio.to_thread(registry.list, role):
                if self._known.get((role, record.name), ("",))[0] != record.address:
                    self._known[role, record.name] = record.address, 0

    async def _probe(self, role: str, name: str, address: str, missed: int) -> None:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        async with open_channel(address, identity=operator_identity(), peer=role, token=self._token) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as error:
                code = error.code()
            else:
                code = grpc.StatusCode.OK
        if code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            missed = 0
        elif await asyncio.to_thread(listens, address):  # the kernel accepts connections for a process that is frozen
            missed += 1
        self._known[role, name] = address, missed
        if missed >= MISSES[role] and name in self._supervisor.names:
            del self._known[role, name]
            self._view.warning(f"{name} has not answered for {missed * PROBE_EVERY_S:.0f} s: frozen, and killed")
            self._supervisor.kill(name)


class StopSignals:
    """The stop signals of this process; a context manager, for the main thread, inside a running loop.

    Args:
        on_second: called at every signal after the first.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        # Under nohup, SIGHUP is ignored and has to stay so.
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._numbers = [number for number in _NUMBERS if not (number == signal.SIGHUP and ignored)]
        self._first: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> "StopSignals":
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def wait(self) -> signal.Signals:
        """Wait for the first signal."""
        return await asyncio.shield(self._first)

    def _received(self, number: signal.Signals) -> None:
        if self._first.done():
            self._on_second()
        else:
            self._first.set_result(signal.Signals(number))
