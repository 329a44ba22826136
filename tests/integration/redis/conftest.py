"""The servers that the rendezvous is tested against: Redis 6.2, which we ship, and 7, which clusters run."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.kit.redis import RedisProcess, newer_server
from weightsync.membership.rendezvous import Rendezvous

GROUP = "tandem:test"


@pytest.fixture(params=["6.2", "7"])
def server(request: pytest.FixtureRequest, redis_process: Callable[..., RedisProcess]) -> Callable[..., RedisProcess]:
    """Starts servers of one version: `server(append_only=False)`."""
    binary = None if request.param == "6.2" else newer_server()
    if request.param == "7" and binary is None:
        pytest.skip("NOT TESTED AGAINST REDIS 7: no redis-server or valkey-server >= 7 is on PATH")
    return partial(redis_process, binary=binary)


@pytest.fixture
def group(server: Callable[..., RedisProcess]) -> Rendezvous:
    """An empty group on a server of its own."""
    return Rendezvous(server().url, GROUP)
