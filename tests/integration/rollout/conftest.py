"""One seeded replica per module: SGLang takes 10 to 20 s to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.replicas import Replica, Trainer, lone_replica


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, model: Path, module_redis: str) -> Iterator[Replica]:
    started = lone_replica(tmp_path_factory.mktemp("run"), model, module_redis)
    try:
        yield started.wait_up()
    finally:
        started.close()


@pytest.fixture(scope="module")
def trainer(replica: Replica, model: Path) -> Iterator[Trainer]:
    made = Trainer(replica)
    made.load(model)
    yield made
    made.close()
