"""How pip finds packages on this machine, as files for a build, which sees neither its environment nor its disk."""

import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

# What a build may need to know; all else (timeouts, colours) is the machine's business.
KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy")
PIP_TIMEOUT_S = 60.0


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def pip_settings(folder: Path) -> Iterator[dict[str, str]]:
    """Writes the files into `folder`, and serves packages that lie on this disk on the loopback address meanwhile.

    Yields: PIP_CONF and, where pip has certificates of its own, CA_PEM, for deploy/images/build.sh.
    """
    given = _configured()
    with contextlib.ExitStack() as stack:
        lines = ["[global]", "timeout = 180"]
        hosts: list[str] = []
        for key in KEYS:
            values = [_reachable(value, stack, hosts) for value in given.get(key, "").split()]
            if values and key != "trusted-host":
                lines.append(f"{key} = {' '.join(values)}")
        if trusted := [*given.get("trusted-host", "").split(), *hosts]:
            lines.append(f"trusted-host = {' '.join(trusted)}")
        settings = {"PIP_CONF": str(folder / "pip.conf")}
        if certificates := given.get("cert"):
            lines.append("cert = /run/secrets/ca.pem")
            settings["CA_PEM"] = certificates
        (folder / "pip.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield settings


def _configured() -> dict[str, str]:
    """What `pip config list` says, environment included; of a key that is given twice, the environment's."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PIP_TIMEOUT_S).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if key not in found or section == ":env:":
            found[key.lstrip(".")] = value.strip("'\"").replace("\\n", " ")
    return found


def _reachable(value: str, stack: contextlib.ExitStack, hosts: list[str]) -> str:
    """A location as a build can reach it: what lies on this disk is served, for as long as `stack` lives."""
    path = Path(urlsplit(value).path)
    if value.startswith(("http://", "https://")) or not path.is_dir():
        return value
    # From its parent: an index refers to files beside it (../files).
    handler = functools.partial(_Quiet, directory=str(path.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, name=f"serve {path}", daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    host = f"127.0.0.1:{server.server_port}"
    hosts.append(host)
    return f"http://{host}/{path.name}/"
