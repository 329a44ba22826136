"""The configuration as a tracker shows it: dotted keys, plain values, no secrets."""

import json
import re
from typing import Any

from tandem_config.schema import RunConfig

Settings = dict[str, str | int | float | bool]
HIDDEN = "(hidden)"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET = re.compile(
    r"(^|_)(token|secret|password|passwd|(api|access|secret|private)_?key|credentials|authorization)$", re.IGNORECASE
)


def public_settings(config: RunConfig) -> Settings:
    """Flatten the configuration, e.g. `{"grpo.group_size": 8}`; nulls and empty lists are left out."""
    found: Settings = {}
    _flatten("", config.model_dump(mode="json"), found)
    return found


def _flatten(prefix: str, value: Any, found: Settings) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            if _SECRET.search(str(name)) and inner is not None:
                found[key] = HIDDEN
            else:
                _flatten(key, inner, found)
    elif isinstance(value, list):
        if any(isinstance(item, dict) for item in value):
            for place, item in enumerate(value):
                _flatten(f"{prefix}.{place}", item, found)
        elif value:
            found[prefix] = without_login(json.dumps(value))
    elif value is not None:
        found[prefix] = without_login(value) if isinstance(value, str) else value


def without_login(text: str) -> str:
    """Remove user and password from the URLs in a text.

    >>> without_login("http://me:secret@mlflow:5000/x")
    'http://mlflow:5000/x'
    """
    return _LOGIN.sub("", text)
