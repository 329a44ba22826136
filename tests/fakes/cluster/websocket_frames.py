"""The server's half of a websocket (RFC 6455), as far as a fake API server's streams need it: binary frames."""

import base64
import hashlib
import struct
import threading
from http.server import BaseHTTPRequestHandler

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE = 2, 8


class ServerSocket:
    """A connection that was upgraded; `send` may be called from several threads."""

    def __init__(self, handler: BaseHTTPRequestHandler, protocol: str) -> None:
        key = handler.headers["Sec-WebSocket-Key"].encode()
        handler.send_response(101)
        handler.send_header("Upgrade", "websocket")
        handler.send_header("Connection", "Upgrade")
        handler.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode())
        handler.send_header("Sec-WebSocket-Protocol", protocol)
        handler.end_headers()
        handler.wfile.flush()
        handler.close_connection = True
        self._reader, self._writer, self._lock = handler.rfile, handler.wfile, threading.Lock()

    def send(self, data: bytes, opcode: int = BINARY) -> None:
        size = len(data)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([size])
        elif size < 1 << 16:
            head += bytes([126]) + struct.pack(">H", size)
        else:
            head += bytes([127]) + struct.pack(">Q", size)
        with self._lock:
            self._writer.write(head + data)
            self._writer.flush()

    def receive(self) -> bytes | None:
        """The next frame of data; None: the client has closed, or is gone."""
        while True:
            head = self._reader.read(2)
            if len(head) < 2:
                return None
            opcode, size = head[0] & 0x0F, head[1] & 0x7F
            if size == 126:
                size = struct.unpack(">H", self._reader.read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self._reader.read(8))[0]
            mask = self._reader.read(4) if head[1] & 0x80 else b"\0\0\0\0"
            data = self._reader.read(size)
            if opcode == CLOSE:
                return None
            if opcode == BINARY:
                return bytes(each ^ mask[index % 4] for index, each in enumerate(data))
