"""evaluation.json: the results of `tandem evaluate`, written by its evaluator, shown by the launcher."""

import json
from pathlib import Path
from typing import Any

EVALUATION_FILE = "evaluation.json"


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """Read the results; None if there are none that can be read."""
    try:
        value = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
