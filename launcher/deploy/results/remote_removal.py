"""Removes a run's folder, in a pod: given to its python with -c, so standard library only, and short.

ROOT FOLDER RUN     removes FOLDER, which is below ROOT, if it is RUN's by its run.json; a folder that is gone is fine

Prints a line of JSON now and then, and at the end: files, bytes. run.json goes last, so that a removal that broke off
can be repeated. Refusals are in the first words on stderr: nothing was removed.
"""

import json
import os
import sys
import time
from pathlib import Path

RUN_FILE = "run.json"
_SAY_S = 5.0


def refuse(why: str) -> None:
    """End without having removed anything."""
    sys.exit(f"refused: nothing was removed: {why}")


def check(root: Path, folder: Path, run: str) -> None:
    """Refuse what is not this run's folder, or has another run's in it."""
    real = folder.resolve()
    if folder.is_symlink() or real == root.resolve() or not real.is_relative_to(root.resolve()):
        refuse(f"{folder} is not a folder of its own below {root}")
    found = [path for path in real.rglob(RUN_FILE) if not path.is_symlink()]
    if real / RUN_FILE not in found and any(real.iterdir()):
        refuse(f"{folder} has no {RUN_FILE}, which would say whose it is")
    for path in found:
        try:
            owner = json.loads(path.read_text(encoding="utf-8"))
            ids = owner["run_id"], owner["launch_id"]
        except (ValueError, TypeError, KeyError) as error:
            refuse(f"{path} does not say whose folder it is ({error!r})")
        if run not in ids:
            refuse(f"{path.parent} is the folder of run {ids[0]!r}, not of {run!r}")


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, and say how far it is; links are removed, not followed."""
    done, said_s = {"files": 0, "bytes": 0}, time.monotonic()
    for place, folders, names in os.walk(folder, topdown=False):
        for path in [Path(place, name) for name in names if place != str(folder) or name != RUN_FILE]:
            done = {"files": done["files"] + 1, "bytes": done["bytes"] + path.lstat().st_size}
            path.unlink()
            if time.monotonic() - said_s > _SAY_S:
                said_s = time.monotonic()
                print(json.dumps(done), flush=True)
        for path in [Path(place, name) for name in folders]:
            path.unlink() if path.is_symlink() else path.rmdir()
    (folder / RUN_FILE).unlink(missing_ok=True)
    folder.rmdir()
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if not where.exists() and not where.is_symlink():
        print(json.dumps({"files": 0, "bytes": 0}))
    else:
        check(Path(sys.argv[1]), where, sys.argv[3])
        remove(where)
