"""One rank without a model: meets the others, then commands or follows. Arguments: rank, world size, scenario.

Rank 0 prints a JSON line per command, and what failed at the end.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from servicekit.environment import ServiceEnvironment
from servicekit.errors import DigestMismatch, TandemError
from servicekit.redis.registry import Registry
from trainer_service.ranks.commands import Command, Commander, Wire, follow
from trainer_service.ranks.liveness import Liveness
from trainer_service.ranks.world import Place, connect, device_of, meet

# Much less than the 30 s of the control group's own collectives.
PATIENCE_S = 3.0


def handlers(rank: int) -> dict[Command, Any]:
    def reply(parts: Sequence[bytes]) -> bytes:
        return f"{rank}:".encode() + b"|".join(parts)

    def refuse(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            raise DigestMismatch("bucket 3")
        return b""

    def fail(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            raise KeyError("lost parameter")
        dist.barrier()
        return b""

    def die(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return b""

    def freeze(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return b""

    return {
        Command.RESTORE: freeze,
        Command.SAVE: reply,
        Command.EXPORT: refuse,
        Command.LOGPROBS: fail,
        Command.PUBLISH: die,
    }


SCENARIOS: dict[str, list[tuple[Command, list[bytes]]]] = {
    "works": [(Command.SAVE, [b"one", b"", b"three"]), (Command.EXPORT, []), (Command.SAVE, []), (Command.STOP, [])],
    "fails": [(Command.LOGPROBS, [])],
    "dies": [(Command.PUBLISH, [])],
    "freezes": [(Command.SAVE, []), (Command.RESTORE, [])],
    "idle": [],
}


def show(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def command(commander: Commander, scenario: str) -> None:
    for each, parts in SCENARIOS[scenario]:
        try:
            show(replies=[reply.decode() for reply in commander.submit(each, parts, PATIENCE_S).result(timeout=30)])
        except TandemError as error:
            show(refused=type(error).__name__, message=str(error))


def main() -> None:
    rank, world_size, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    place = Place(rank=rank, world_size=world_size, local_rank=rank, master=None)
    registry = Registry(os.environ["REDIS_URL"], "ranks-test")
    environment = ServiceEnvironment.model_validate(
        {"REDIS_URL": os.environ["REDIS_URL"], "TANDEM_RUN_ID": "ranks-test", "TANDEM_RUN_DIR": Path.cwd()}
    )
    store = meet(place, registry, environment, 30.0)
    liveness = Liveness(store, rank, world_size)
    liveness.start(lambda _: None)
    wire = Wire(connect(place, store, device_of(place), "127.0.0.1", 30.0))
    show(met=rank)
    try:
        if rank == 0:
            commander = Commander()
            threading.Thread(target=command, args=(commander, scenario), daemon=True).start()
            commander.run(wire, handlers(rank))
        else:
            follow(wire, handlers(rank))
    except Exception as error:  # noqa: BLE001 - the boundary of the rank
        liveness.report(error)
        if rank == 0:
            show(failed=liveness.diagnose(error))
        os._exit(1)
    liveness.end()
    os._exit(0)


if __name__ == "__main__":
    main()
