"""`tandem top`: a running run in the terminal, live, as the coordinator sees it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launcher.view.status import find_coordinator, last_words
from launcher.view.top_view import draw
from servicekit.errors import TandemError, Unavailable, rpc_errors
from servicekit.redis.records import COORDINATOR
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import operator_identity
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc
from tandem_files.run_folder import read_token

# A snapshot takes the coordinator milliseconds; eyes need no more than one a second.
INTERVAL_S = 1.0
_ANSWER_S = 5.0
# A coordinator that was killed is announced again within its lease and seconds of imports.
_PATIENCE_S = 60.0
_OVER = frozenset({"finished", "failed", "interrupted"})

# The coordinator's address and the run's token.
Find = Callable[[], tuple[str, str]]


def show(run_dir: Path, console: Console, *, once: bool) -> None:
    """Draws the run until it is over, or once.

    Args:
        console: where; on something else than a terminal the run is drawn once.
    Raises: ConfigError: as find_coordinator; Unavailable: no coordinator answers, and why.
    """

    def find() -> tuple[str, str]:
        address, state, failures = find_coordinator(run_dir)
        if not address:
            raise Unavailable("; ".join([f"{run_dir}: {state}", *map(str, failures)]))
        return address, read_token(run_dir)

    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(draw(asyncio.run(overview_at(*find()))))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last = asyncio.run(_follow(find, lambda seen: live.update(seen, refresh=True), lambda: last_words(run_dir)))
    console.print(last)


async def overview_at(address: str, token: str) -> dict[str, Any]:
    """What the coordinator there says. token: the run's. Raises: TandemError: it does not answer, or is too old to."""
    async with open_channel(address, identity=operator_identity(), peer=COORDINATOR, token=token) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with rpc_errors(f"the coordinator at {address}"):
            answer = await stub.GetOverview(pb.GetOverviewRequest(), timeout=_ANSWER_S)
    found: dict[str, Any] = MessageToDict(answer.overview)
    return found


async def _follow(
    find: Find, update: Callable[[RenderableType], None], last_words: Callable[[], str]
) -> RenderableType:
    """Until the run is over, by the coordinator's word or its last ones. Returns: the last picture.

    Raises: TandemError: nobody has answered for _PATIENCE_S, or from the first.
    """
    loop = asyncio.get_running_loop()
    picture: RenderableType | None = None
    heard_s = loop.time()
    while True:
        try:
            overview = await overview_at(*await asyncio.to_thread(find))
        except TandemError as error:
            if picture is None or loop.time() - heard_s > _PATIENCE_S:
                raise
            if (words := last_words()).partition(":")[0] in _OVER:
                return Group(picture, Text(f"the run has ended: {words}", "bold"))
            update(Group(Text(f"no answer for {loop.time() - heard_s:.0f} s: {error}\n", "bold yellow"), picture))
        else:
            heard_s, picture = loop.time(), draw(overview)
            update(picture)
            if overview["state"] in _OVER:
                return picture
        await asyncio.sleep(INTERVAL_S)
