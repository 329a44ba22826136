"""A rollout replica of the chaos tests: the real service and receiver, with plain tensors in the place of SGLang."""

import asyncio
import os
from pathlib import Path
from typing import Any

from rollout_service import app as rollout_app
from rollout_service.engine import GroupRequest
from rollout_service.sglang_engine.receiver import ShardReceiver, add_receiver
from servicekit.lifecycle.termination import run_main
from servicekit.rpc.sync_server import start_sync_server
from tests.chaos.gates import Gate
from tests.chaos.members import GatedMember, begin, leave, set_up_gates
from tests.chaos.policy import ROLLOUT, SPECS, dtype_of
from tests.kit.stores import empty_like_rank
from tests.unit.rollout.fake_engine import FakeEngine
from weightsync.layouts.sglang import sglang_layout


class GatedEngine(FakeEngine):
    """The engine of a replica without one, with gates where it freezes (its part in PAUSE) and generates."""

    def __init__(self, address: str, gate: Gate) -> None:
        super().__init__(num_ranks=1)
        self.rank_addresses = [address]
        self._gate = gate
        self._turn, self._number = asyncio.Lock(), 0

    async def before(self, group: GroupRequest) -> None:
        """Groups one by one, with a gate before each."""
        await super().before(group)
        async with self._turn:
            number, self._number = self._number, self._number + 1
            await asyncio.to_thread(self._gate.at, "generate", number)

    async def freeze(self) -> None:
        await asyncio.to_thread(self._gate.at, "pause")
        await super().freeze()


def main(settings: dict[str, Any]) -> None:
    """A rollout replica: its service, and the receiver of its only rank."""
    config, environment = begin(settings)
    name, folder = str(settings["name"]), Path(settings["folder"])
    gate = set_up_gates(folder, name)
    spec = SPECS[settings["size"]]
    member = GatedMember(
        spec=spec,
        slot=f"{name}/0",
        parallel=ROLLOUT,
        tensors=empty_like_rank(sglang_layout(spec, ROLLOUT), 0, dtype_of(settings["size"])),
        redis_url=environment.redis_url,
        group=f"tandem:{environment.run_id}",
        lease_ttl_s=config.sync.lease_ttl_s,
        disk_folder=config.sync.published_folder(environment.run_dir),
    )
    member.start()
    address = f"unix:{folder}/{name}-{os.getpid()}.sock"
    receiver = ShardReceiver(member, lambda _: None)
    server = start_sync_server(add_receiver, receiver, address)

    async def serve(stop: asyncio.Event) -> None:
        await rollout_app.serve(config, name, environment, stop, lambda *_: GatedEngine(address, gate))

    code = run_main("rollout", serve)
    server.stop(grace=0)
    member.close()
    leave(code)
