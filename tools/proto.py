"""Generates tandem_api/ from protos/, or checks that the committed copy is current.

    python -m tools.proto write      generates tandem_api/ in place
    python -m tools.proto check      generates into a temporary folder and lists the differences (exit 1)

The folders under protos/ mirror the package, so that the generated imports need no patching.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PROTOS = REPO / "protos"
PACKAGE = "tandem_api"
INIT = '"""Generated from protos/ (make proto); do not edit."""\n'
GENERATE_TIMEOUT_S = 120.0


def generate(out: Path) -> None:
    """Write the package `tandem_api` under `out`: messages, stubs for gRPC, and types for both.

    Raises: RuntimeError: protoc refused a proto; the message has its output.
    """
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    if not sources:
        raise RuntimeError(f"no .proto file under {PROTOS}")
    plugins = Path(sys.executable).parent
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    done = subprocess.run(
        command + sources, cwd=REPO, capture_output=True, text=True, timeout=GENERATE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"protoc failed ({done.returncode}):\n{done.stderr}")
    folders = {out / PACKAGE, *(path for path in (out / PACKAGE).rglob("*") if path.is_dir())}
    for folder in folders:
        (folder / "__init__.py").write_text(INIT)
    (out / PACKAGE / "py.typed").touch()


def contents(root: Path) -> dict[str, bytes]:
    """Read every generated file under `root`, by its relative path, without caches."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def differences(fresh: dict[str, bytes], committed: dict[str, bytes]) -> list[str]:
    """List the files that are missing, left over or different in `committed`, a line per file.

    >>> differences({"a": b"1", "b": b"2"}, {"b": b"3", "c": b"4"})
    ['missing: a', 'differs: b', 'left over: c']
    """
    lines = [f"missing: {name}" for name in fresh if name not in committed]
    lines += [f"differs: {name}" for name in fresh if name in committed and fresh[name] != committed[name]]
    lines += [f"left over: {name}" for name in committed if name not in fresh]
    return lines


def write() -> int:
    """Replace tandem_api/ by a fresh generation."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        shutil.rmtree(REPO / PACKAGE, ignore_errors=True)
        shutil.copytree(Path(scratch) / PACKAGE, REPO / PACKAGE)
    print(f"{PACKAGE}/ written from {PROTOS.name}/")
    return 0


def check() -> int:
    """Compare tandem_api/ with a fresh generation and print the differences. Returns: 1 if there are any, else 0."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        lines = differences(contents(Path(scratch) / PACKAGE), contents(REPO / PACKAGE))
    for line in lines:
        print(f"{PACKAGE}: {line}", file=sys.stderr)
    if lines:
        print(f"{PACKAGE}/ is not generated from {PROTOS.name}/: run `make proto` and commit it.", file=sys.stderr)
    return 1 if lines else 0


def main() -> int:
    """Run the command line. Returns: the exit code."""
    parser = argparse.ArgumentParser(description="Generate tandem_api/ from protos/, or check it.")
    parser.add_argument("action", choices=["write", "check"])
    try:
        return {"write": write, "check": check}[parser.parse_args().action]()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
