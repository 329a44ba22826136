"""What runs in a pod next to the files: given to its python with -c, so standard library only, and short.

list ROOT SKIPPED...    a line of JSON per file below ROOT: path, size
send FILE OFFSET        its bytes from OFFSET on; on stderr, at the end, the SHA-256 of all of it
"""

import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path


def walk(folder: Path, root: Path, skipped: Collection[str]) -> Iterator[str]:
    """Yield the paths, below root, of the files in a folder: no hidden ones, no links, not what is skipped."""
    for path in sorted(folder.iterdir()):
        name = str(path.relative_to(root))
        if path.name[0] == "." or path.is_symlink() or name in skipped:
            continue
        if path.is_dir():
            yield from walk(path, root, skipped)
        elif path.is_file():
            yield name


def list_files(root: Path, skipped: Collection[str]) -> None:
    """Print the files below a folder."""
    for name in walk(root, root, skipped):
        print(json.dumps({"path": name, "size": (root / name).stat().st_size}), flush=True)


def send(path: Path, offset: int) -> None:
    """Write a file from an offset to stdout, and the digest of the whole file to stderr."""
    digest, left = hashlib.sha256(), offset
    with path.open("rb") as file:
        while data := file.read(min(left, 1 << 20) if left else 1 << 20):
            digest.update(data)
            if left:
                left -= len(data)
            else:
                sys.stdout.buffer.write(data)
    sys.stdout.flush()
    sys.stderr.write(digest.hexdigest() + "\n")


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "send":
        send(where, int(sys.argv[3]))
    elif where.is_dir():
        list_files(where, sys.argv[3:])
    else:
        sys.exit(f"refused: the claim has no folder {where}: the run has not started, or it is another claim")
