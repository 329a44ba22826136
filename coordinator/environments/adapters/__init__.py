"""Environments of other libraries: a module for each, which alone imports its library (docs/environments.md)."""

import importlib
from typing import Any

from coordinator.workers.episodes.replies import Message


def library(name: str, extra: str) -> Any:
    """Import a module of a library. Raises: ImportError: it is missing; names the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; this adapter needs: pip install 'tandem[{extra}]'") from error


def user(text: str) -> list[Message]:
    """Return a text as what the user says."""
    return [{"role": "user", "content": text}]
