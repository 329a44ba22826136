"""One Docker engine, with the images of this checkout, for all tests that need them."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.images.compose import resolved, service
from tests.images.engine import Engine, Unavailable, checked, engine, provide_base
from tests.images.pip_settings import pip_settings
from tests.images.stand_ins import provide_redis

# The images hold 4 GB of packages, most of them torch's and SGLang's, and this machine may be busy.
BUILD_S = 3600.0
# A service of the compose file for each image.
KINDS = {"coordinator": "coordinator", "trainer": "trainer", "rollout": "rollout-0"}
BASE = resolved(service("coordinator")["build"]["args"]["BASE"])
COMPOSES = [["docker", "compose"], ["docker-compose"]]


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """The engine of this machine, or one that is started for the tests and goes away with all its data."""
    started = engine()
    try:
        found = started.__enter__()
    except Unavailable as why:
        pytest.skip(f"NO DOCKER: images are not tested: {why}")
    try:
        yield found
    finally:
        started.__exit__(None, None, None)


@pytest.fixture(scope="session")
def images(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names of the CPU images by kind, built by `make images`."""
    try:
        provide_base(docker, BASE)
    except Unavailable as why:
        pytest.skip(f"NO BASE IMAGE: images are not tested: {why}")
    with pip_settings(tmp_path_factory.mktemp("pip")) as settings:
        environ = {**docker.environ, **settings, "BUILD_NETWORK": "host"}
        checked(["make", "images"], environ, BUILD_S)
    return {kind: resolved(service(name)["image"]) for kind, name in KINDS.items()}


@pytest.fixture(scope="session")
def redis_image(docker: Engine, images: dict[str, str]) -> str:
    """Name of the Redis image of compose file and manifests; the engine has it."""
    name = resolved(service("redis")["image"])
    provide_redis(docker, name, BASE)
    return name


@pytest.fixture(scope="session")
def composes() -> list[list[str]]:
    """The compose commands of this machine, `docker compose` before `docker-compose`."""
    found = [command for command in COMPOSES if is_there(command)]
    if not found:
        pytest.skip("NO COMPOSE: neither `docker compose` nor `docker-compose` is on this machine")
    return found


def is_there(command: list[str]) -> bool:
    """Whether a compose command answers; it needs no engine for that."""
    return (
        shutil.which(command[0]) is not None
        and subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0
    )
