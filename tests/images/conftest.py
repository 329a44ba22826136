"""One Docker engine, with the images of this checkout, for all tests that need them."""

from collections.abc import Iterator

import pytest

from tests.images.compose import resolved, service
from tests.images.engine import Engine, Unavailable, checked, engine, provide_base
from tests.images.pip_settings import pip_settings

# The images hold 4 GB of packages, most of them torch's and SGLang's, and this machine may be busy.
BUILD_S = 3600.0
# A service of the compose file for each image.
KINDS = {"coordinator": "coordinator", "trainer": "trainer", "rollout": "rollout-0"}


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
        provide_base(docker, resolved(service("coordinator")["build"]["args"]["BASE"]))
    except Unavailable as why:
        pytest.skip(f"NO BASE IMAGE: images are not tested: {why}")
    with pip_settings(tmp_path_factory.mktemp("pip")) as settings:
        environ = {**docker.environ, **settings, "BUILD_NETWORK": "host"}
        checked(["make", "images"], environ, BUILD_S)
    return {kind: resolved(service(name)["image"]) for kind, name in KINDS.items()}
