"""`tandem top`: a run in the terminal, live by its coordinator's overview; where there is none, by the run's folder."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launcher.view.status import find_coordinator, last_outcome
from launcher.view.top_view import Drawing
from servicekit.errors import TandemError, Unavailable, rpc_errors
from servicekit.redis.records import COORDINATOR, Failure
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import operator_identity
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import is_locked, read_token

# A snapshot takes the coordinator milliseconds; one a second is enough to watch.
INTERVAL_S = 1.0
_ANSWER_S = 5.0
# A coordinator that was killed is announced again within its lease and the seconds of its start.
_PATIENCE_S = 60.0
_OVER = frozenset({"finished", "failed", "interrupted"})

# Finds the overview of the run, as `look_at` does.
Look = Callable[[], Awaitable[Mapping[str, Any]]]


def show(run_dir: Path, console: Console, *, once: bool) -> None:
    """Draw the run until it is over, or once; a run that is over is drawn from its folder.

    Args:
        console: if it is not a terminal, the run is drawn once.
    Raises: ConfigError: as find_coordinator; Unavailable: no coordinator answers and there is no folder, and why.
    """
    look = partial(look_at, run_dir)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(Drawing(asyncio.run(look())))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last = asyncio.run(_follow(look, partial(live.update, refresh=True), lambda: last_outcome(run_dir)))
    console.print(last)


async def look_at(run_dir: Path) -> Mapping[str, Any]:
    """Return the overview of a run: its coordinator's, else what its folder holds, in the same form.

    Raises: TandemError: the coordinator does not answer, or there is none and no folder of the run.
    """
    address, state, failures = await asyncio.to_thread(find_coordinator, run_dir)
    if address:
        return await overview_at(address, read_token(run_dir))
    return await asyncio.to_thread(_from_folder, run_dir, state, failures)


def _from_folder(run_dir: Path, state: str, failures: Sequence[Failure]) -> Mapping[str, Any]:
    """Make the overview from the run's folder. Raises: Unavailable: in a pod there is none of the launcher's."""
    if not (run_dir / RESOLVED_CONFIG).is_file():
        raise Unavailable("; ".join([f"{run_dir}: {state}", *map(str, failures)]))
    from coordinator.web.folder import FolderSource

    overview = FolderSource(run_dir).picture()
    if is_locked(run_dir):  # what the folder says is of the launch before
        return {**overview, "state": "starting", "error": ""}
    if overview["state"] not in _OVER:
        text = f"no launcher runs it on this machine; this is what {run_dir} holds"
        overview["messages"] = [{"time_s": overview["now_s"], "kind": "warning", "text": text}]
    return overview


async def overview_at(address: str, token: str) -> dict[str, Any]:
    """Ask the coordinator for its overview.

    Args:
        token: secret of the run.
    Returns: GetOverviewResponse.overview.
    Raises: TandemError: it does not answer, or does not have this call.
    """
    async with open_channel(address, identity=operator_identity(), peer=COORDINATOR, token=token) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with rpc_errors(f"the coordinator at {address}"):
            answer = await stub.GetOverview(pb.GetOverviewRequest(), timeout=_ANSWER_S)
    found: dict[str, Any] = MessageToDict(answer.overview)
    return found


async def _follow(
    look: Look, update: Callable[[RenderableType], None], last_outcome: Callable[[], str]
) -> RenderableType:
    """Draw until the run is over, by its overview or by the coordinator's last words in the folder.

    Returns: the last picture.
    Raises: TandemError: no coordinator has answered for _PATIENCE_S, or the first call failed.
    """
    loop = asyncio.get_running_loop()
    picture: RenderableType | None = None
    answered_s = loop.time()
    while True:
        try:
            overview = await look()
        except TandemError as error:
            if picture is None or loop.time() - answered_s > _PATIENCE_S:
                raise
            if (words := last_outcome()).partition(":")[0] in _OVER:
                return Group(picture, Text(f"the run has ended: {words}", "bold"))
            update(Group(Text(f"no answer for {loop.time() - answered_s:.0f} s: {error}\n", "bold yellow"), picture))
        else:
            answered_s, picture = loop.time(), Drawing(overview)
            update(picture)
            if overview["state"] in _OVER:
                return picture
        await asyncio.sleep(INTERVAL_S)
