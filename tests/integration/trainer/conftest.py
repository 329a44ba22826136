"""The tiny model of the trainer's integration tests."""

from pathlib import Path

import pytest

from tests.kit.models import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 folder."""
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen2-tied", folder)
    return folder
