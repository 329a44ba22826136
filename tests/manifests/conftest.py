"""Schemas are read once, not once per object."""

import functools
from collections.abc import Iterator

import pytest
from kubernetes_validate import utils


@pytest.fixture(scope="session", autouse=True)
def cached_schemas() -> Iterator[None]:
    """kubernetes-validate parses 4 MB of JSON per call; the functions that use it stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield
