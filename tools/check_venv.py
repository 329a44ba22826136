"""Checks that the virtual environment has exactly the versions that requirements/ pins; run by `make venv`.

    python -m tools.check_venv            reports packages that are missing, damaged, or have another version
    python -m tools.check_venv repair     removes the metadata of damaged packages, so that pip installs them again

Uses the standard library only: it runs before anything is installed.
"""

import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def read_pins(path: Path) -> dict[str, str]:
    """Read {package: version} from a file of `name==version` lines; comments and empty lines are skipped.

    Raises: ValueError: another kind of line.
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
    """Return one line per pinned package that is missing or has another version (a local part, +cpu, is ignored)."""
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


def damaged(folder: Path) -> dict[str, Path]:
    """Find packages of a site-packages folder with missing or truncated files, as an interruption leaves them.

    Returns: {name: folder of its metadata}; packages without a list of their files (RECORD) are among them.
    """
    files = {info: metadata.Distribution.at(info).files for info in sorted(folder.glob("*.dist-info"))}
    owners = Counter(str(file) for listed in files.values() for file in listed or ())
    return {
        info.name.partition("-")[0]: info
        for info, listed in files.items()
        if listed is None or not all(_is_whole(file, owners[str(file)]) for file in listed)
    }


def _is_whole(file: metadata.PackagePath, owners: int) -> bool:
    try:
        size = Path(str(file.locate())).stat().st_size
    except FileNotFoundError:
        return file.suffix == ".pyc"
    # Scripts, .pth files and metadata contain paths, which change with the folder; a shared file is of one package.
    as_unpacked = file.parts[0] != ".." and file.suffix != ".pth" and not file.parts[0].endswith(".dist-info")
    return owners > 1 or not as_unpacked or file.size in (None, size)


def repair(folder: Path) -> int:
    """Remove the metadata of damaged packages: pip refuses to replace them, but installs over their files."""
    for name, info in damaged(folder).items():
        print(f"venv: {name} is not whole, it is installed again")
        shutil.rmtree(info)
    return 0


def site_packages() -> Path:
    """Return the folder of this interpreter's packages."""
    return Path(sysconfig.get_path("purelib"))


def main(arguments: Sequence[str] = ()) -> int:
    """Print the problems, or which torch build is installed. Returns: 0; 1 for problems, 2 for wrong usage."""
    if list(arguments) == ["repair"]:
        return repair(site_packages())
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    pins = read_pins(REQUIREMENTS / "torch.txt") | read_pins(REQUIREMENTS / "lock.txt")
    lines = wrong_packages(pins)
    lines += [f"{name} is not whole: `rm .venv/tandem.stamp`, then `make venv`" for name in damaged(site_packages())]
    for line in lines:
        print(f"venv: {line}", file=sys.stderr)
    if not lines:
        print(f"venv: {len(pins)} packages as pinned, torch {metadata.version('torch')}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
