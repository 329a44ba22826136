"""What the fake cluster's streams reach: a command of this machine that stands for one in a pod, and a port."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.cluster.store import Object
from tests.fakes.cluster.websocket_frames import CLOSE, ServerSocket

CONNECT_S = 10.0


def run_command(
    pod: Object, words: Sequence[str], claims: Mapping[str, Path], stream: ServerSocket, limit: int | None
) -> None:
    """Run a command where the claims of the pod are.

    Args:
        limit: bytes of its output after which the connection breaks; None: it does not.
    """
    mounts = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0].get("volumeMounts", [])}
    folders = {
        mounts[volume["name"]]: str(claims[volume["persistentVolumeClaim"]["claimName"]])
        for volume in pod["spec"].get("volumes", [])
        if volume["name"] in mounts and "persistentVolumeClaim" in volume
    }
    command = [
        sys.executable if index == 0 and text == "python" else _local(text, folders) for index, text in enumerate(words)
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False)
    errors = threading.Thread(target=_relay, args=(process.stderr, 2, stream, None))
    errors.start()
    if not _relay(process.stdout, 1, stream, limit):
        process.kill()  # and the connection ends without a close frame, as by a proxy that restarts
        process.wait()
        return
    errors.join()
    code = process.wait()
    status: Object = {"metadata": {}, "status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        text = f"command terminated with non-zero exit code: exit code {code}"
        status |= {"status": "Failure", "reason": "NonZeroExitCode", "message": text, "details": {"causes": causes}}
    stream.send(b"\3" + json.dumps(status).encode())
    stream.send(b"\x03\xe8", CLOSE)


def connect(address: tuple[str, int], stream: ServerSocket) -> None:
    """Copy between a stream and what stands for a port, until one of them ends."""
    with socket.create_connection(address, timeout=CONNECT_S) as target:
        target.settimeout(None)
        back = threading.Thread(target=_answers, args=(target, stream), daemon=True)
        back.start()
        while (data := stream.receive()) is not None:
            target.sendall(data[1:])


def _local(text: str, folders: dict[str, str]) -> str:
    """A path of the pod as a path of this machine; a program's text stays."""
    for mount, folder in folders.items():
        if text == mount or text.startswith(f"{mount}/"):
            return folder + text[len(mount) :]
    return text


def _relay(pipe: Any, channel: int, stream: ServerSocket, limit: int | None) -> bool:
    """Send what a pipe has. Returns: False: `limit` bytes were sent before its end."""
    sent = 0
    while data := pipe.read1(1 << 16):
        if limit is not None and sent + len(data) > limit:
            stream.send(bytes([channel]) + data[: limit - sent])
            return False
        stream.send(bytes([channel]) + data)
        sent += len(data)
    return True


def _answers(target: socket.socket, stream: ServerSocket) -> None:
    try:
        while data := target.recv(1 << 16):
            stream.send(b"\0" + data)
        stream.send(b"\x03\xe8", CLOSE)
    except OSError:
        return
