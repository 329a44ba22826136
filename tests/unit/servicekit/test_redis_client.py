"""Connecting to Redis: what a person reads when it does not work."""

import pytest

from servicekit.errors import ConfigError
from servicekit.redis_client import connect, redact


def test_replies_are_text(redis_server):
    client = connect(redis_server)
    client.set("key", "größe")
    assert client.get("key") == "größe"


def test_a_server_that_is_not_there_is_unreachable_by_name():
    with pytest.raises(ConfigError, match=r"redis://127\.0\.0\.1:1/0 is unreachable.*REDIS_URL"):
        connect("redis://127.0.0.1:1/0")


def test_a_missing_password_is_asked_for(redis_process):
    server = redis_process(password="right-one")
    with pytest.raises(ConfigError, match=r"wants a password.*REDIS_URL"):
        connect(server.url_without_password)


def test_a_wrong_password_is_refused_and_not_shown(redis_process):
    server = redis_process(password="right-one")
    with pytest.raises(ConfigError, match="refuses the user or the password") as caught:
        connect(server.url.replace("right-one", "wrong-one"))
    assert "wrong-one" not in str(caught.value)
    assert connect(server.url).ping()


def test_a_user_without_permission_is_told(redis_process):
    server = redis_process()
    connect(server.url).execute_command("ACL", "SETUSER", "ann", "on", ">pw", "~tandem:*", "+get", "-ping")
    with pytest.raises(ConfigError, match="does not let this user do that"):
        connect(server.url.replace("unix://", "unix://ann:pw@"))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379", "127.0.0.1:6379", "", "redis://127.0.0.1:port", "redis://h:99999"]
)
def test_a_url_that_is_none_is_refused(url):
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
def test_passwords_are_not_shown(url, shown):
    assert redact(url) == shown
