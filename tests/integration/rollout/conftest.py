"""One seeded replica per module: SGLang takes 10 to 20 s to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rollout.replica import Replica, Trainer
from tests.integration.rollout.tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, model: Path, module_redis: str) -> Iterator[Replica]:
    started = Replica(tmp_path_factory.mktemp("run"), model, module_redis)
    try:
        yield started.wait_up()
    finally:
        started.close()


@pytest.fixture(scope="module")
def trainer(replica: Replica, model: Path) -> Iterator[Trainer]:
    made = Trainer(replica)
    made.load(model)
    yield made
    made.member.close()
