"""Connecting to Redis: what a person reads when it does not work."""

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from servicekit.addresses import join_address
from servicekit.errors import ConfigError, Unavailable
from servicekit.redis.client import connect, redact, with_tls_files
from tests.kit.processes import free_port
from tests.kit.redis import RedisProcess
from tests.networks import needs_ipv6


def test_replies_are_text(redis_server: str) -> None:
    client = connect(redis_server)
    client.set("key", "größe")
    assert client.get("key") == "größe"


def test_a_server_that_is_not_there_is_unreachable_by_name() -> None:
    with pytest.raises(Unavailable, match=r"redis://ann:\*\*\*@127\.0\.0\.1:1/0 is unreachable.*REDIS_URL"):
        connect("redis://ann:secret@127.0.0.1:1/0")


@needs_ipv6
def test_a_server_is_reached_by_ipv6() -> None:
    endpoint = ("::1", free_port())
    with RedisProcess("pass", tcp=endpoint):
        assert connect(f"redis://:pass@{join_address(*endpoint)}/0").ping()


@pytest.mark.parametrize("host", ["fd00::5:6379", "::1:6379/0", "[fd00::5:6379"])
def test_an_ipv6_host_without_its_brackets_is_malformed(host: str) -> None:
    """Said without the password."""
    with pytest.raises(
        ConfigError, match=r"redis://ann:\*\*\*@.* is malformed: .*in brackets: redis://\[fd00::5\]:6379"
    ):
        connect(f"redis://ann:secret@{host}")


def test_a_server_that_comes_late_is_waited_for_and_said_so_once(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process()
    server.kill()
    starting = threading.Timer(0.7, server.start)
    starting.start()
    with capture_logs() as lines:
        assert connect(server.url, wait_s=60).ping()
    starting.join()
    assert [line["event"] for line in lines] == ["waiting for Redis"]
    assert "is unreachable" in lines[0]["error"]


def test_the_wait_for_a_server_ends() -> None:
    with capture_logs() as lines, pytest.raises(Unavailable, match="is unreachable"):
        connect("redis://127.0.0.1:1/0", wait_s=0.6)
    assert len(lines) == 1


def test_a_wrong_password_is_not_waited_for(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process(password="right-one")
    with capture_logs() as lines, pytest.raises(ConfigError, match="refuses"):
        connect(server.url.replace("right-one", "wrong-one"), wait_s=60)
    assert lines == []


def test_files_for_tls_become_options_of_the_url_once() -> None:
    files = {"TANDEM_REDIS_CA": "/tls/ca.crt", "TANDEM_REDIS_CERT": "/tls/c", "TANDEM_REDIS_KEY": "/tls/k", "HOME": "/"}
    once = with_tls_files("rediss://ann:p%40w@db:6379/1?health_check_interval=3", files)
    assert once.startswith("rediss://ann:p%40w@db:6379/1?")
    assert set(once.partition("?")[2].split("&")) == {
        "ssl_ca_certs=%2Ftls%2Fca.crt",
        "ssl_certfile=%2Ftls%2Fc",
        "ssl_keyfile=%2Ftls%2Fk",
        "health_check_interval=3",
    }
    assert with_tls_files(once, files) == once
    assert with_tls_files("unix:///run/s", files) == "unix:///run/s"
    assert with_tls_files("redis://db", {"HOME": "/"}) == "redis://db"


@pytest.mark.parametrize(
    ("url", "files", "message"),
    [
        ("redis://:secret@db", {"TANDEM_REDIS_CA": "/ca"}, r"redis://:\*\*\*@db has none; write rediss://"),
        ("rediss://db", {"TANDEM_REDIS_KEY": "/k"}, "set both or none"),
    ],
)
def test_files_that_do_not_go_with_the_url_are_refused(url: str, files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_tls_files(url, files)


def test_a_missing_password_is_asked_for(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process(password="right-one")
    with pytest.raises(ConfigError, match=r"wants a password.*REDIS_URL"):
        connect(server.url_without_password)


def test_a_wrong_password_is_refused_and_not_shown(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process(password="right-one")
    with pytest.raises(ConfigError, match="refuses the user or the password") as caught:
        connect(server.url.replace("right-one", "wrong-one"))
    assert "wrong-one" not in str(caught.value)
    assert connect(server.url).ping()


def test_a_user_without_permission_is_told(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process()
    connect(server.url).execute_command("ACL", "SETUSER", "ann", "on", ">pw", "~tandem:*", "+get", "-ping")
    with pytest.raises(ConfigError, match="does not allow this user what Tandem needs"):
        connect(server.url.replace("unix://", "unix://ann:pw@"))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379", "127.0.0.1:6379", "", "redis://127.0.0.1:port", "redis://h:99999"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://"):
        connect(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:se:c@ret@db:6379", "redis://:***@db:6379"),
        ("rediss://ann:secret@db/1", "rediss://ann:***@db/1"),
        ("unix://ann:secret@/run/r.sock?db=1", "unix://ann:***@/run/r.sock?db=1"),
        ("redis://db?password=secret&db=1", "redis://db?password=***&db=1"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown
