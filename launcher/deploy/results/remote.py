"""What runs in a pod beside the files: given to its python with -c, so standard library only, and short.

list ROOT SKIPPED...    a line of JSON per file below ROOT: path, size
send FILE OFFSET        its bytes from OFFSET on; on stderr, at the end, the SHA-256 of all of it
"""

import hashlib
import json
import sys
from pathlib import Path


def list_files(folder: Path, root: Path, skipped: list[str]) -> None:
    """Print the files below a folder, but hidden ones, links, and those of folders that are skipped."""
    for path in sorted(folder.iterdir()):
        name = str(path.relative_to(root))
        if path.name[0] == "." or path.is_symlink() or name in skipped:
            continue
        if path.is_dir():
            list_files(path, root, skipped)
        elif path.is_file():
            print(json.dumps({"path": name, "size": path.stat().st_size}), flush=True)


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
        list_files(where, where, sys.argv[3:])
    else:
        sys.exit(f"no folder {where}")
