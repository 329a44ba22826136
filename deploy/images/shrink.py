"""Run in the coordinator's image by the interpreter whose packages shall take less room; prints what each part takes.

Test suites and what only compilers read go away. Packages of pure Python move into one zip archive as compiled files,
from which Python imports them as it does from folders (kubernetes 37: 74 MB of source become 6 MB). All else is
compiled here, because the user that the image runs as cannot write beside it.
"""

import compileall
import shutil
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
ARCHIVE = "packed.zip"
# Pure Python, and nothing in them reads a file beside its module.
PACKED = (
    "antlr4",
    "cffi",
    "dateutil",
    "kubernetes",
    "latex2sympy2_extended",
    "markdown_it",
    "math_verify",
    "mpmath",
    "oauthlib",
    "opentelemetry",
    "prometheus_client",
    "pycparser",
    "pydantic",
    "pygments",
    "redis",
    "requests",
    "requests_oauthlib",
    "rich",
    "structlog",
    "sympy",
    "tenacity",
    "typer",
    "urllib3",
    "websocket",
)
# The asyncio half of the Kubernetes client needs aiohttp, which the image does without. Of pyarrow: RPCs, S3
# (obstore's is used), query plans, headers, and two more copies of a library that the wheel has under three names.
UNUSED = (
    "kubernetes/aio",
    "pyarrow/*flight*",
    "pyarrow/*s3*",
    "pyarrow/_substrait*",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.*.*",
)
FOR_COMPILERS = (".a", ".c", ".cpp", ".h", ".hpp", ".pxd", ".pyi", ".pyx")
REPORTED_BYTES = 1_000_000


def remove_unused(site: Path) -> None:
    """Removes UNUSED, `tests` folders, and files that only compilers and type checkers read."""
    for path in [path for pattern in UNUSED for path in site.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in sorted(site.rglob("tests"), reverse=True):
        shutil.rmtree(folder)
    for path in site.rglob("*"):
        if path.suffix in FOR_COMPILERS and path.is_file():
            path.unlink()


def pack(site: Path, names: Sequence[str]) -> None:
    """Moves packages into the archive as compiled files, and puts the archive on Python's path."""
    with zipfile.ZipFile(site / ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for folder in (site / name for name in names if (site / name).is_dir()):
            # `legacy`: beside the sources, where the importer of archives looks.
            for cache in list(folder.rglob("__pycache__")):
                shutil.rmtree(cache)
            compileall.compile_dir(folder, quiet=1, legacy=True, workers=0)
            # Folders too: by their entries the importer knows packages without an __init__.py.
            for path in [folder, *sorted(folder.rglob("*"))]:
                if path.suffix == ".pyc" or path.is_dir():
                    archive.write(path, path.relative_to(site).as_posix())
            shutil.rmtree(folder)
    (site / "packed.pth").write_text(f"{ARCHIVE}\n", encoding="utf-8")


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())


def main() -> None:
    """Shrinks the packages of the running interpreter."""
    remove_unused(SITE)
    pack(SITE, PACKED)
    compileall.compile_dir(SITE, quiet=1, workers=0)
    for path in sorted(SITE.iterdir()):
        if size_bytes(path) > REPORTED_BYTES:
            print(f"{size_bytes(path) / 1e6:7.1f} MB  {path.name}")


if __name__ == "__main__":
    main()
