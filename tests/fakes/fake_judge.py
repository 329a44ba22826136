"""A small OpenAI-compatible endpoint, as much of one as a judge needs."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Reply = tuple[int, Mapping[str, str], Any]


def said(text: str | None) -> Reply:
    """The reply of a judge that says this."""
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@dataclass
class Endpoint:
    """Speaks as much of HTTP as the judge needs; replies in the order of the list, the last one for ever."""

    replies: list[Reply]
    models: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.keys.add(headers.get("authorization", ""))
                writer.write(self._answer(lines[0], body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _models(self) -> Reply:
        return self.models, {}, f"models for {self.keys}"

    def _answer(self, line: str, body: bytes) -> bytes:
        status, headers, content = self._models()
        if line.startswith("POST /v1/chat/completions "):
            self.requests.append(json.loads(body))
            status, headers, content = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        data = json.dumps(content).encode()
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {status} X\r\n{fields}Content-Length: {len(data)}\r\n\r\n".encode() + data
