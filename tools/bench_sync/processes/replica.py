"""A replica as users run it (`python -m`), with SGLang's own weight updates as commands."""

import argparse
import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

# SGLang's ranks are spawned processes that import this module first: it must stay light, imports are in main().
gc.disable()


class StockUpdates:
    """SGLang's own updates on the same engine, called as its HTTP server calls them; commands are `do_*`."""

    def __init__(self) -> None:
        self.engine: Any = None

    async def run(self, command: dict[str, Any]) -> Any:
        """Run a command; its other fields are the arguments."""
        return await getattr(self, f"do_{command.pop('do')}")(**command)

    async def do_init_group(self, port: int, rank_offset: int, world_size: int, group: str) -> None:
        """Join an update group with all ranks of the engine."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group,
            backend="gloo",
        )
        _require(await self.engine.manager.init_weights_update_group(request, None))

    async def do_begin(self) -> None:
        """Pause generation, flush the cache and begin an update."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, PauseGenerationReqInput

        manager = self.engine.manager
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        _require(((await manager.flush_cache()).success, "the cache was not flushed"))
        _require(await manager.begin_weight_update(BeginWeightUpdateReqInput()))

    async def do_update(
        self, names: list[str], shapes: list[list[int]], dtype: str, group: str, load_format: str | None
    ) -> None:
        """Receive a bucket of tensors; load_format: as SGLang's."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        request = UpdateWeightsFromDistributedReqInput(
            names=names,
            dtypes=[dtype] * len(names),
            shapes=shapes,
            group_name=group,
            flush_cache=False,
            load_format=load_format,
        )
        _require(await self.engine.manager.update_weights_from_distributed(request, None))

    async def do_end(self) -> None:
        """End an update and continue generation."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, EndWeightUpdateReqInput

        _require(await self.engine.manager.end_weight_update(EndWeightUpdateReqInput()))
        await self.engine.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def do_all_ranks(self) -> None:
        """Wait until all ranks have finished their updates: SGLang answers an update from disk after the first one."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        _require(await self.engine.manager.begin_weight_update(BeginWeightUpdateReqInput()))  # has a barrier
        _require(await self.engine.manager.end_weight_update(EndWeightUpdateReqInput()))

    async def do_disk(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        # The engine starts with load_format "dummy", so a load from disk must name its format.
        request = UpdateWeightFromDiskReqInput(model_path=folder, load_format="safetensors")
        _require(await self.engine.manager.update_weights_from_disk(request, None))


def _require(reply: Any) -> None:
    success, message = reply[:2]
    if not success:
        raise RuntimeError(str(message))


def main() -> int:
    """Run the replica until SIGTERM. Returns: its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--commands", type=Path, required=True)
    arguments = parser.parse_args()

    from servicekit.lifecycle.termination import run_main

    async def service(stop: asyncio.Event) -> None:
        from rollout_service.app import make_sglang_engine, serve
        from servicekit.environment import ServiceEnvironment
        from servicekit.logs import configure_logging
        from tandem_config.loading import load_config
        from tools.bench_sync.processes.commands import serve_commands

        configure_logging("rollout", name=arguments.name)
        stock = StockUpdates()

        def make_engine(*parts: Any) -> Any:
            stock.engine = make_sglang_engine(*parts)
            return stock.engine

        commands = await serve_commands(arguments.commands, stock.run)
        config = load_config(arguments.config)
        await serve(config, arguments.name, ServiceEnvironment.from_env(), stop, make_engine)
        commands.close()

    return run_main("rollout", service)


if __name__ == "__main__":
    sys.exit(main())
