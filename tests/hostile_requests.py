"""Requests that nobody should send: random messages of a service's own types, extreme values, bytes that are none, and
requests that are right but for a field or two (near_valid_requests.py).

Most values are drawn within the bounds of servicekit/rpc/request_bounds.py, so that handlers are reached.
"""

import math
import os
import random
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from servicekit.errors import REASON_KEY
from servicekit.rpc.bounds import Items, Number, Text
from servicekit.rpc.limits import CHANNEL_OPTIONS
from servicekit.rpc.request_bounds import BOUNDS
from tests.near_valid_requests import Near, changed

CALL_S = 10.0
# What is submitted to a stream of samples waits for the end of a pause.
STREAM_S = 1.0
# Of many fields: one that is out of bounds in each would keep all of them from the handlers.
ROUNDS = ("Round", "ReplicaSpec", "ParallelSizes")
STRINGS = ("", "x", "r-1", "../../etc", "/nonexistent/x", "\x00", "A" * 5000, "rollout-0", "é\u202e", "%s%n", "{}")
# What gRPC itself says without asking us, and so without our reason.
OF_GRPC = ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss_mib: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        """As /proc has it now."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path(f"/proc/{pid}/fd").iterdir())))


class Hostile:
    """Draws requests from a seed.

    Args:
        near: every second request is one of these with up to two fields changed; None: none is.
        rounds_s: longest timeout of a round that is within bounds.
    """

    def __init__(self, seed: int, near: Near | None = None, rounds_s: float = 1.0) -> None:
        self.random = random.Random(seed)
        self._near = near
        self._rounds_s = rounds_s

    def payloads(self, method: MethodDescriptor) -> list[bytes]:
        """Messages of one call."""
        if self._near is not None and self.random.random() < 0.5:
            return self._nearly(self._near.requests(method, self.random))
        kind = self.random.random()
        if kind < 0.15:
            return [self.random.randbytes(self.random.choice([1, 10, 1000, 100_000]))]
        if kind < 0.2:
            return [b"\x0a" + b"\xff" * 20]
        if kind < 0.25:
            return [b""]
        many = self.random.choice([1, 2, 3]) if method.client_streaming else 1
        return [self.message(method.input_type).SerializeToString() for _ in range(many)]

    def _nearly(self, messages: list[Message]) -> list[bytes]:
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            at = self.random.randrange(len(messages))
            if messages[at].DESCRIPTOR.fields:
                messages[at] = changed(messages[at], self.random, self._other_value)
        return [message.SerializeToString() for message in messages]

    def _other_value(self, field: FieldDescriptor) -> Any:
        assert field.containing_type is not None
        return self._value(field.containing_type, field, 0)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A random message."""
        message: Message = GetMessageClass(kind)()
        for field in kind.fields:
            if self.random.random() < 0.2 or depth > 4:
                continue
            if field.is_repeated:
                many = self.random.choice([0, 1, 3, 100])
                values = [
                    self._value(kind, field, depth) for _ in range(many if field.message_type is None else min(many, 3))
                ]
                getattr(message, field.name).extend([value for value in values if value is not None])
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
            else:
                setattr(message, field.name, self._value(kind, field, depth))
        return message

    def _value(self, kind: Descriptor, field: FieldDescriptor, depth: int) -> Any:
        if field.message_type is not None:
            return self.message(field.message_type, depth + 1)
        bound = BOUNDS[kind.full_name][field.name]
        inner = bound.each if isinstance(bound, Items) else bound
        good = self.random.random() < (0.98 if kind.name in ROUNDS else 0.8)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.choice([b"", bytes(4), self.random.randbytes(3), self.random.randbytes(400)])
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            wrong = [s for s in STRINGS if isinstance(inner, Text) and good and inner.problem(s)]
            return self.random.choice([s for s in STRINGS if s not in wrong] or ["r-1"])
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            if good:
                return self._rounds_s if field.name.endswith("_timeout_s") else self.random.choice([0.0, 0.5, 1.0])
            return self.random.choice([0.0, -1.0, 1e-30, 1e30, math.nan, math.inf, -math.inf])
        return self._integer(field, inner, good)

    def _integer(self, field: FieldDescriptor, bound: object, good: bool) -> int:
        if field.enum_type is not None:
            return self.random.choice([0, 1, 2, 3, 4, 99])
        if field.name == "token":  # a large one would shut out everybody after it
            return self.random.choice([0, 1])
        if good:
            owner = field.containing_type
            small = field.name == "policy_version" or (owner is not None and owner.name == "ParallelSizes")
            largest = int(bound.high) if isinstance(bound, Number) and not small else 2
            return self.random.choice([0, 1, 1, 2, largest] if largest < 2**31 else [0, 1, 2, 7])
        unsigned = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
        bits = 64 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
        edge = 1 << (bits - 1)
        return self.random.choice([2 * edge - 1, 30_000_000] if unsigned else [edge - 1, -edge, -1])


class Attack:
    """Sends requests to a service, and to others at its address (`also`), and keeps what they answered."""

    def __init__(self, address: str, service: Any, *, also: Sequence[Any] = (), leave_out: Sequence[str] = ()) -> None:
        self.answers: Counter[str] = Counter()  # by "method status"
        self.untyped: Counter[str] = Counter()
        self._address = address
        methods = [method for each in (service, *also) for method in each.methods]
        self._methods = [method for method in methods if method.name not in leave_out]
        self._prefix = f"/{service.full_name}/"
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def send(self, hostile: Hostile, calls: int) -> None:
        """So many calls, one after the other."""
        for _ in range(calls):
            method = hostile.random.choice(self._methods)
            longest_s = STREAM_S if method.client_streaming and method.server_streaming else CALL_S
            timeout_s = 0.001 if hostile.random.random() < 0.05 else longest_s
            big = [("x-big", "A" * 7000)] if hostile.random.random() < 0.02 else []
            try:
                # On the wire a single message is a stream of one.
                call = self._channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
                list(call(iter(hostile.payloads(method)), timeout=timeout_s, metadata=big))
                self.answers[f"{method.name} OK"] += 1
            except grpc.RpcError as error:
                self._note(method, error)

    def _note(self, method: MethodDescriptor, error: grpc.RpcError) -> None:
        call: Any = error
        code = call.code().name
        self.answers[f"{method.name} {code}"] += 1
        reason = dict(call.trailing_metadata() or ()).get(REASON_KEY)
        if code in ("INTERNAL", "UNKNOWN", "UNAVAILABLE") or (reason is None and code not in OF_GRPC):
            self.untyped[f"{method.name} {code}: {(call.details() or '')[:200]}"] += 1

    def status(self, method: str = "GetStatus") -> None:
        """A call that only asks is answered, with odd connections beside it; "": there is none."""
        if method:
            self._channel.unary_unary(f"{self._prefix}{method}")(b"", timeout=CALL_S)

    def odd_connections(self, many: int) -> list[socket.socket]:
        """Connections that say nothing, half of HTTP/2, HTTP/1, or a header of 16 MB. They stay open."""
        host, port = self._address.rsplit(":", 1)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        large = preface + bytes.fromhex("000000040000000000") + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01" + b"A" * 100_000
        openings = (b"", preface, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", large)
        opened = []
        for index in range(many):
            opened.append(socket.create_connection((host, int(port)), timeout=5))
            opened[-1].sendall(openings[index % len(openings)])
        return opened

    def close(self) -> None:
        """Ends the channel."""
        self._channel.close()
