"""Tandem's own updates: whole rounds with digests, driven as the coordinator drives them."""

import time
from collections.abc import Awaitable, Callable

from tandem_api.weights.v1 import weights_pb2 as pb
from tools.bench_sync.methods.load import generating
from tools.bench_sync.methods.session import Seconds, Session
from weightsync.round.phases import COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

IN_PLACE, STAGED = pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED
COLLECTIVE, COLOCATED = pb.SYNC_TRANSPORT_COLLECTIVE, pb.SYNC_TRANSPORT_COLOCATED
DRAIN, KEEP_KV = pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP_KV

Update = Callable[[Session], Awaitable[Seconds]]


def ours(install: pb.InstallMode.ValueType, transport: pb.SyncTransport.ValueType) -> Update:
    """Make a method: a round while the engines are idle."""

    async def update(session: Session) -> Seconds:
        return await run_round(session, install, transport, DRAIN)

    return update


def ours_while_generating(install: pb.InstallMode.ValueType) -> Update:
    """Make a method: a round while the engines generate; their requests pause in place and continue."""

    async def update(session: Session) -> Seconds:
        async with generating(session) as progress:
            seconds = await run_round(session, install, COLLECTIVE, KEEP_KV)
            return seconds | {"silence": progress.longest_silence_s(), "typical_silence": progress.typical_silence_s()}

    return update


async def run_round(
    session: Session,
    install: pb.InstallMode.ValueType,
    transport: pb.SyncTransport.ValueType,
    pause: pb.PauseMode.ValueType,
) -> Seconds:
    """Run one round; its "pause" lasts from the request that stops generation to the reply after which it continues."""
    start_s = time.perf_counter()
    round_ = session.describe_round(install, transport, pause)
    seconds = {"prepare": await session.everywhere(PREPARE, round_)}
    if install == IN_PLACE:
        seconds["stop"] = await session.on_replicas(PAUSE, round_)
    seconds["transfer"] = await session.everywhere(TRANSFER, round_)
    seconds["verify"] = await session.on_replicas(VERIFY, round_)
    seconds["commit"] = await session.everywhere(COMMIT, round_)
    seconds["total"] = time.perf_counter() - start_s
    paused = ["stop", "transfer", "verify", "commit"] if install == IN_PLACE else ["commit"]
    return seconds | {"pause": sum(seconds[part] for part in paused)}
