"""Says whether the virtual environment holds exactly the versions that requirements/ pins; run by `make venv`."""

import sys
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def read_pins(path: Path) -> dict[str, str]:
    """Returns {package: version} of a file of `name==version` lines; comments and empty lines are left out.

    Raises: ValueError: a line is anything else.
    """
    pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, separator, version = line.partition("==")
        if separator == "" or version == "":
            raise ValueError(f"{path.name}: {line!r} is not name==version")
        pins[name] = version
    return pins


def wrong_packages(pins: dict[str, str]) -> list[str]:
    """Returns one line per pinned package that is missing or has another version (a local part, +cpu, is ignored)."""
    lines = []
    for name, wanted in pins.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is missing, wanted {wanted}")
            continue
        if found.partition("+")[0] != wanted:
            lines.append(f"{name} is {found}, wanted {wanted}")
    return lines


def main() -> int:
    """Prints what is wrong and returns 1, or says which torch build is installed."""
    pins = read_pins(REQUIREMENTS / "torch.txt") | read_pins(REQUIREMENTS / "lock.txt")
    lines = wrong_packages(pins)
    for line in lines:
        print(f"venv: {line}", file=sys.stderr)
    if not lines:
        print(f"venv: {len(pins)} packages as pinned, torch {metadata.version('torch')}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
