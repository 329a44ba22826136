"""Records that another program has written under our prefix: left out with one warning, by every reader."""

import dataclasses
import json
from collections.abc import Callable, Iterator

import pytest
import redis

from servicekit.errors import AlreadyExists, DeadlineExceeded, Unavailable
from servicekit.redis.client import connect
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from tests.kit.waiting import until

PREFIX = "tandem:run-1"
OURS = ServiceRecord(role="rollout", name="rollout-0", address="127.0.0.1:1", worker_id="w1")
WHOLE = dataclasses.asdict(dataclasses.replace(OURS, name="rollout-9"))
_WRONG: dict[str, tuple[object, ...]] = {
    "address": (5, None, "", "nowhere", "host:99999", "a b:1", ["h:1"], True),
    "metrics_address": (5, "nowhere"),
    "worker_id": (5, None, ""),
    "release": (5, None),
    "settings": (5, {}),
    "name": (5, "", ["x"]),
}
TEXTS: dict[str, str | bytes] = {
    "nothing": "",
    "half an object": "{",
    "a list": "[]",
    "null": "null",
    "a number": "5",
    "a text": '"rollout-9"',
    "an empty object": "{}",
    "no UTF-8": b"\xff" * 10,
    "a tower": "[" * 100_000,
    "a number as address": json.dumps({"address": 5}),
    "no worker": json.dumps({name: WHOLE[name] for name in ("role", "name", "address")}),
    "of another name": json.dumps(WHOLE | {"name": "rollout-0"}),
    "of another role": json.dumps(WHOLE | {"role": "trainer"}),
}
TEXTS |= {
    f"{field} {value!r}": json.dumps(WHOLE | {field: value}) for field, values in _WRONG.items() for value in values
}


@pytest.fixture
def registry(redis_server: str) -> Iterator[Registry]:
    opened = Registry(redis_server, "run-1", settings=AgreedSettings({"run.seed": "0"}))
    yield opened
    opened.close()


@pytest.fixture
def client(redis_server: str) -> "redis.Redis":
    return connect(redis_server)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_record_that_is_none_of_ours_is_left_out_by_every_reader(
    registry: Registry,
    client: "redis.Redis",
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    text: str | bytes,
) -> None:
    client.set(f"{PREFIX}:service:rollout:rollout-9", text)
    client.sadd(f"{PREFIX}:names:rollout", "rollout-9")
    registry.announce(OURS, 30)  # compares releases and settings with those of all others
    ours = [dataclasses.replace(OURS, settings=registry.settings_digest)]
    for _ in range(3):
        assert registry.list("rollout") == ours
    assert registry.wait_for("rollout", 1, 1.0) == ours
    assert not registry.remove_refusing("rollout", "rollout-9")
    with pytest.raises(DeadlineExceeded, match="rollout-9; there is rollout-0"):
        registry.wait_for("rollout", ["rollout-9"], 0.0)
    output = capsys.readouterr()  # or in the log, where a test before has configured it
    said = [text.count(f"{PREFIX}:service:rollout:rollout-9") for text in (output.out + output.err, caplog.text)]
    assert max(said) == 1


FAILURES = ["", "{", "null", "[]", "5", b"\xff", "{}", json.dumps({"role": "rollout", "name": "x", "reason": "y"})]
FAILURES += [
    json.dumps({"role": "rollout", "name": "x", "reason": reason, "unix_s": at})
    for reason, at in [(5, 1.0), ("y", "1"), ("y", None), ("y", True)]
]


@pytest.mark.parametrize("text", FAILURES)
def test_a_failure_that_cannot_be_read_is_left_out(
    registry: Registry, client: "redis.Redis", text: str | bytes
) -> None:
    client.set(f"{PREFIX}:failure:rollout:x", text)
    client.sadd(f"{PREFIX}:failures", "rollout:x", "no colon", b"\xff:\xff")
    registry.report_failure("trainer", "trainer", "why")
    assert [failure.reason for failure in registry.failures()] == ["why"]
    registry.announce(OURS, 30)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", b"\xff", "{}", '{"worker_id": 5}', '{"worker_id": "x"}'])
def test_our_own_record_is_written_anew_over_what_is_none(
    registry: Registry, client: "redis.Redis", text: str | bytes
) -> None:
    key = f"{PREFIX}:service:rollout:rollout-0"
    client.set(key, text)
    registry.announce(OURS, 0.3)
    assert [record.name for record in registry.list("rollout")] == ["rollout-0"]
    client.set(key, text)
    until(lambda: [record.name for record in registry.list("rollout")] == ["rollout-0"])
    client.set(key, text)
    registry.withdraw()


def test_a_record_of_another_worker_holds_the_name_as_before(registry: Registry, client: "redis.Redis") -> None:
    client.set(f"{PREFIX}:service:rollout:rollout-0", json.dumps(WHOLE | {"name": "rollout-0", "worker_id": "w9"}))
    with pytest.raises(AlreadyExists, match=r"is held by worker 'w9' at 127\.0\.0\.1:1"):
        registry.announce(OURS, 30)


READERS: dict[str, tuple[str, Callable[[Registry], object]]] = {
    "names:rollout": ("set", lambda registry: registry.list("rollout")),
    "failures": ("set", lambda registry: registry.failures()),
    "value:page_url": ("string", lambda registry: registry.get_value("page_url")),
}


@pytest.mark.parametrize("suffix", READERS)
def test_a_key_of_another_type_is_named(registry: Registry, client: "redis.Redis", suffix: str) -> None:
    kind, read = READERS[suffix]
    client.rpush(f"{PREFIX}:{suffix}", "x")
    with pytest.raises(Unavailable, match=rf"the key {PREFIX}:{suffix} is no {kind}: .* remove it"):
        read(registry)
    client.delete(f"{PREFIX}:{suffix}")
    read(registry)


@pytest.mark.parametrize("key", ["service:rollout:rollout-0", "names:rollout"])
def test_a_name_under_a_key_of_another_type_is_not_taken(registry: Registry, client: "redis.Redis", key: str) -> None:
    client.rpush(f"{PREFIX}:{key}", "x")
    with pytest.raises(Unavailable, match=f"the key {PREFIX}:{key} is no "):
        registry.announce(OURS, 30)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000])
def test_settings_that_cannot_be_read_are_told_by_their_digest(
    registry: Registry, client: "redis.Redis", text: str
) -> None:
    client.set(f"{PREFIX}:value:settings:abc", text)
    assert registry.explain_settings("abc").startswith("the digest of its settings is abc")
