"""`rollout_service` whose processes note what they exclude from garbage collection, in files of the folder NOTES.

With NOTES_THREAD set, it has a thread from its start on.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path

_freeze = gc.freeze


def full_collections() -> int:
    """Return how often everything was collected."""
    return int(gc.get_stats()[2]["collections"])


_before = full_collections()


def note() -> None:
    """Freeze, and note it."""
    _freeze()
    seen = {
        "command": sys.orig_argv,
        "frozen": gc.get_freeze_count(),
        "full_collections": full_collections() - _before,
    }
    Path(os.environ["NOTES"], str(os.getpid())).write_text(json.dumps(seen), encoding="utf-8")


gc.freeze = note  # in spawned ranks too: they import this module


if __name__ == "__main__":
    from rollout_service.__main__ import main

    if "NOTES_THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.exit(main())
