"""The ACL against a real Redis: everything that Tandem does is allowed, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import redis

from servicekit.errors import ConfigError, Unavailable
from servicekit.redis import acl as redis_acl
from servicekit.redis.client import connect
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tests.house.repository import REPO
from tests.kit.redis import RedisProcess
from tests.kit.waiting import throughout, until
from weightsync.membership.rendezvous import Rendezvous, SlotLease

PASSWORD = "right-one"


@dataclass(frozen=True)
class Server:
    """A server that knows the users of the ACL file: `admin` may do all, `tandem_url` is Tandem's."""

    admin: redis.Redis
    strangers_url: str
    tandem_url: str


@pytest.fixture
def server(redis_process: Callable[..., RedisProcess]) -> Server:
    """Only the lines of the ACL file make users."""
    process = redis_process()
    first = redis.Redis.from_url(process.url, decode_responses=True)
    first.execute_command("ACL", "SETUSER", "root", "on", ">root", "~*", "&*", "+@all")
    admin = redis.Redis.from_url(process.url.replace("unix://", "unix://root:root@"), decode_responses=True)
    for line in redis_acl.acl_file(PASSWORD).splitlines():
        _, name, *rules = line.split()
        admin.execute_command("ACL", "SETUSER", name, "reset", *rules)
    return Server(admin, process.url, process.url.replace("unix://", f"unix://{redis_acl.USER}:{PASSWORD}@"))


def use_everything(url: str) -> None:
    """All that services ask of Redis, by hand and in the scripts, leases that run out included."""
    registry = Registry(url, "demo.1")
    for name in ("rollout-0", "rollout-0"):
        registry.announce(ServiceRecord(role="rollout", name=name, address="h:1", worker_id="w"), 60)
    assert [record.name for record in registry.list("rollout")] == ["rollout-0"]
    registry.set_value("store", "h:2")
    assert registry.wait_value("store", 1) == "h:2"
    registry.withdraw()
    registry.close()
    group = Rendezvous(url, "tandem:demo.1")
    epoch = group.join("trainer/0", "a", 60)
    group.claim("coordinator", "c", 0.001)
    until(lambda: "coordinator" not in group.snapshot().members, timeout_s=20)
    epoch = group.snapshot().epoch
    assert group.heartbeat("trainer/0", "a", 60) == "ok"
    group.bind_endpoint("trainer/0", "a", epoch, "h:3")
    group.confirm("trainer/0", "a", epoch)
    assert group.snapshot().endpoint == "h:3"
    group.leave("trainer/0", "a")


def test_the_rules_allow_what_tandem_does_and_no_command_more(server: Server) -> None:
    server.admin.config_resetstat()
    use_everything(server.tandem_url)
    stats = server.admin.info("commandstats")
    used = {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"] > stat["rejected_calls"]}
    # What the admin has just done, and what no rule can refuse.
    used -= {"config", "info", "auth", "hello"}
    assert used == {command.partition("|")[0] for command in redis_acl.COMMANDS}


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("MONITOR",),
        ("SHUTDOWN",),
        ("SCRIPT", "FLUSH"),
        ("PUBLISH", "tandem:x", "y"),
        ("GET", "other:key"),
        ("SET", "{other}:tandem:x", "y"),
        ("EVALSHA", "0" * 40, "1", "other:key"),
    ],
    ids=lambda command: " ".join(command),
)
def test_everything_else_is_refused(server: Server, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError), connect(server.tandem_url) as client:
        client.execute_command(*command)


def test_strangers_may_ping_and_nothing_else(server: Server) -> None:
    with connect(server.strangers_url) as client:
        assert client.ping()
        for command in (("GET", "tandem:x"), ("SET", "tandem:x", "y"), ("INFO",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_a_service_without_the_password_is_told_so(server: Server) -> None:
    with pytest.raises(ConfigError, match="REDIS_URL"):
        Registry(server.strangers_url, "demo.1")


def test_rights_that_come_while_a_service_starts_are_waited_for(server: Server) -> None:
    server.admin.execute_command("ACL", "SETUSER", redis_acl.USER, "-evalsha")
    with pytest.raises(ConfigError, match=r"no permissions to run the 'evalsha' command.*servicekit\.redis\.acl"):
        Registry(server.tandem_url, "demo.1")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(Registry, server.tandem_url, "demo.1", wait_s=20)
        throughout(lambda: not starting.done(), 0.3)
        server.admin.execute_command("ACL", "SETUSER", redis_acl.USER, "+evalsha")
        assert starting.result(timeout=20).list("rollout") == []


def test_rights_that_are_taken_away_while_a_service_runs_may_come_back(server: Server) -> None:
    registry = Registry(server.tandem_url, "demo.1")
    lost: list[str] = []
    registry.announce(ServiceRecord(role="rollout", name="rollout-0", address="h:1", worker_id="w"), 0.3, lost.append)
    lease = SlotLease(Rendezvous(server.tandem_url, "tandem:demo.1"), "rollout-0/0", 0.3)
    lease.start()
    server.admin.execute_command("ACL", "SETUSER", redis_acl.USER, "-evalsha")
    with pytest.raises(Unavailable, match="no permissions"):
        lease.rendezvous.snapshot()
    throughout(lambda: not lost and lease._lease._thread.is_alive(), 1.0)
    server.admin.execute_command("ACL", "SETUSER", redis_acl.USER, "+evalsha")
    until(lambda: lease.slot in lease.rendezvous.snapshot().members)
    until(lambda: [record.name for record in registry.list("rollout")] == ["rollout-0"])
    lease.close()
    registry.close()


def test_the_command_prints_the_file_without_the_password() -> None:
    def run(password: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "servicekit.redis.acl"]
        environment = {**os.environ, redis_acl.PASSWORD_VARIABLE: password}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    printed = run(PASSWORD)
    assert (printed.returncode, printed.stdout) == (0, redis_acl.acl_file(PASSWORD))
    assert PASSWORD not in printed.stdout
    assert run("").returncode == 2


def test_it_needs_nothing_installed() -> None:
    """Operators make the Secret on their own machines, from a checkout: -S is without site-packages."""
    command = [sys.executable, "-S", "-m", "servicekit.redis.acl"]
    environment = {redis_acl.PASSWORD_VARIABLE: PASSWORD, "PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, redis_acl.acl_file(PASSWORD)), done.stderr
