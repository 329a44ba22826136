"""Commands to a benchmark's processes: a line of JSON in each direction over a Unix socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
LINE_BYTES = 1 << 24  # names and shapes of every tensor of a model

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


async def serve_commands(path: Path, handler: Handler) -> asyncio.Server:
    """Answer {"do": ..., ...} with {"ok": result} or {"error": text}."""

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                reply = {"ok": await handler(json.loads(line))}
            except Exception as error:  # noqa: BLE001 - the boundary: the benchmark fails with this text
                reply = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(serve_connection, path, limit=LINE_BYTES)


class CommandClient:
    """The benchmark's end of a connection; runs one command at a time."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, name: str, path: Path) -> "CommandClient":
        """Connect to a process that already listens. name: of the process, for errors."""
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
        return cls(name, reader, writer)

    async def call(self, do: str, **fields: Any) -> Any:
        """Run a command in the process.

        Args:
            do: name of the command.
            fields: its arguments, JSON values.
        Returns: its result.
        Raises: RuntimeError: the process's error; TimeoutError: no answer within DEADLINE_S.
        """
        self._writer.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_S):
            await self._writer.drain()
            line = await self._reader.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended during {do}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {do}: {reply['error']}")
        return reply["ok"]

    def close(self) -> None:
        """End the connection."""
        self._writer.close()
