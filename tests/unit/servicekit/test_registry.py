"""The registry against a real Redis: leases, fencing, waits, outages."""

import dataclasses
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest

from servicekit.errors import (
    Aborted,
    AlreadyExists,
    ConfigurationSkew,
    DeadlineExceeded,
    ReleaseSkew,
    Unavailable,
)
from servicekit.redis.client import connect
from servicekit.redis.failures import record_failure
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.versions import release
from tests.kit.redis import RedisProcess
from tests.kit.waiting import throughout, until

TTL_S = 0.3
OpenRegistry = Callable[..., Registry]


def record(
    name: str = "rollout-0", worker_id: str = "w1", role: str = "rollout", address: str = "127.0.0.1:1"
) -> ServiceRecord:
    return ServiceRecord(role=role, name=name, address=address, metrics_address="127.0.0.1:2", worker_id=worker_id)


@pytest.fixture
def open_registry() -> Iterator[OpenRegistry]:
    """Registries that are closed after the test."""
    opened: list[Registry] = []

    def open_one(url: str, run_id: str = "run-1", settings: AgreedSettings | None = None) -> Registry:
        opened.append(Registry(url, run_id, settings=settings))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def lose(registry: Registry) -> None:
    """The registry's process dies: no more heartbeats, no withdrawal."""
    assert registry._lease is not None
    registry._lease.stop()


def test_announced_services_are_listed_by_role_and_run(redis_server: str, open_registry: OpenRegistry) -> None:
    first, second, reader = (open_registry(redis_server) for _ in range(3))
    second.announce(record("rollout-1", "w2"), 30)
    first.announce(record("rollout-0", "w1"), 30)
    assert reader.list("rollout") == [record("rollout-0", "w1"), record("rollout-1", "w2")]
    assert reader.list("trainer") == []
    assert open_registry(redis_server, "run-2").list("rollout") == []


def test_a_lease_outlives_its_time_while_it_is_renewed_and_ends_without(
    redis_server: str, open_registry: OpenRegistry
) -> None:
    owner, reader = open_registry(redis_server), open_registry(redis_server)
    owner.announce(record(), TTL_S)
    throughout(lambda: reader.list("rollout") == [record()], duration_s=3 * TTL_S)
    lose(owner)
    until(lambda: reader.list("rollout") == [])


def test_a_live_record_of_another_worker_is_not_replaced(redis_server: str, open_registry: OpenRegistry) -> None:
    owner, rival = open_registry(redis_server), open_registry(redis_server)
    owner.announce(record(worker_id="w1", address="127.0.0.1:1111"), TTL_S)
    with pytest.raises(AlreadyExists, match=r"'rollout-0' is held by worker 'w1' at 127\.0\.0\.1:1111"):
        rival.announce(record(worker_id="w2"), TTL_S)
    assert [each.worker_id for each in rival.list("rollout")] == ["w1"]
    lose(owner)
    until(lambda: rival.list("rollout") == [])
    rival.announce(record(worker_id="w2"), TTL_S)
    assert [each.worker_id for each in rival.list("rollout")] == ["w2"]


def test_a_withdrawal_removes_only_ones_own_record(redis_server: str, open_registry: OpenRegistry) -> None:
    slow, successor = open_registry(redis_server), open_registry(redis_server)
    slow.announce(record(worker_id="w1"), TTL_S)
    lose(slow)
    until(lambda: successor.list("rollout") == [])
    successor.announce(record(worker_id="w2"), 30)
    slow.withdraw()
    assert [each.worker_id for each in successor.list("rollout")] == ["w2"]
    successor.withdraw()
    assert slow.list("rollout") == []
    assert connect(redis_server).keys("*") == []


def test_ones_own_record_can_be_replaced(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    registry.announce(record(address="127.0.0.1:1"), 30)
    registry.announce(record(address="127.0.0.1:2"), 30)
    assert [each.address for each in registry.list("rollout")] == ["127.0.0.1:2"]
    with pytest.raises(ValueError, match="'rollout-0' already"):
        registry.announce(record("rollout-1"), 30)


def test_a_heartbeat_survives_an_outage_and_announces_again(
    redis_process: Callable[..., RedisProcess], open_registry: OpenRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis_process()
    owner, reader = open_registry(server.url), open_registry(server.url)
    owner.announce(record(), TTL_S)
    server.kill()
    with pytest.raises(Unavailable):
        reader.list("rollout")
    server.start()
    assert reader.wait_for("rollout", ["rollout-0"], timeout_s=10) == [record()]


def test_a_heartbeat_that_finds_a_successor_stops_and_tells(
    redis_process: Callable[..., RedisProcess], open_registry: OpenRegistry
) -> None:
    server = redis_process()
    owner, successor = open_registry(server.url), open_registry(server.url)
    lost = threading.Event()
    told: list[str] = []

    def hear(text: str) -> None:
        told.append(text)
        lost.set()

    owner.announce(record(worker_id="w1"), 3.0, on_lost=hear)
    connect(server.url).flushall()  # Redis has lost its data, and another worker is faster
    successor.announce(record(worker_id="w2"), 30)
    assert lost.wait(10)
    assert "held by worker 'w2'" in told[0]
    assert [each.worker_id for each in successor.list("rollout")] == ["w2"]


def test_wait_for_returns_once_all_are_there_in_the_order_asked_for(
    redis_server: str, open_registry: OpenRegistry
) -> None:
    first, second, waiter = (open_registry(redis_server) for _ in range(3))
    with futures.ThreadPoolExecutor(2) as pool:
        by_name = pool.submit(waiter.wait_for, "rollout", ["rollout-1", "rollout-0"], 20)
        by_count = pool.submit(waiter.wait_for, "rollout", 2, 20)
        first.announce(record("rollout-0", "w1"), 30)
        assert futures.wait([by_name, by_count], timeout=0.1).done == set()
        second.announce(record("rollout-1", "w2"), 30)
        assert [each.name for each in by_name.result(10)] == ["rollout-1", "rollout-0"]
        assert [each.name for each in by_count.result(10)] == ["rollout-0", "rollout-1"]


def test_wait_for_names_who_is_missing(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    registry.announce(record("rollout-1"), 30)
    names = ["rollout-0", "rollout-1", "rollout-2"]
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s for rollout rollout-0, rollout-2; there is rollout-1$"):
        registry.wait_for("rollout", names, timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="2 of 3 rollout services; there is rollout-1"):
        registry.wait_for("rollout", 3, timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="1 of 1 trainer services; there is none"):
        registry.wait_for("trainer", 1, timeout_s=0)


def test_wait_for_outlasts_an_outage_but_not_its_deadline(
    redis_process: Callable[..., RedisProcess], open_registry: OpenRegistry
) -> None:
    server = redis_process()
    registry = open_registry(server.url)
    server.kill()
    with pytest.raises(DeadlineExceeded, match="for Redis"):
        registry.wait_for("rollout", 1, timeout_s=0.2)


def test_closing_ends_a_wait(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(registry.wait_for, "rollout", 1, 60)
        assert futures.wait([waiting], timeout=0.1).done == set()
        registry.close()
        with pytest.raises(Aborted):
            waiting.result(10)


def test_closing_in_the_midst_of_a_command_ends_the_wait_in_the_same_way(
    redis_server: str, open_registry: OpenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servicekit.redis.registry._FIRST_POLL_S", 1e-4)
    monkeypatch.setattr("servicekit.redis.registry._LONGEST_POLL_S", 1e-4)
    chance, before_s = random.Random(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            for _ in range(300):
                registry = open_registry(redis_server)
                waiting = pool.submit(registry.wait_for, "rollout", 1, 60)
                futures.wait([waiting], timeout=chance.uniform(0.0, 0.005))
                registry.close()
                with pytest.raises(Aborted):
                    waiting.result(10)
    finally:
        sys.setswitchinterval(before_s)


def test_values_are_waited_for_and_expire(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    with pytest.raises(DeadlineExceeded, match="value 'store'"):
        registry.wait_value("store", timeout_s=0.05)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(registry.wait_value, "store", 20)
        registry.set_value("store", "127.0.0.1:29500", ttl_s=TTL_S)
        assert waiting.result(10) == "127.0.0.1:29500"
    until(lambda: registry.get_value("store") is None)


def test_a_service_of_another_release_is_refused_by_name(redis_server: str, open_registry: OpenRegistry) -> None:
    first, second = open_registry(redis_server), open_registry(redis_server)
    first.announce(record("coordinator", "w1", role="coordinator", address="10.0.0.1:5"), 30)
    other = dataclasses.replace(record(), release="tandem 9.9, protocol 9")
    with pytest.raises(ReleaseSkew) as caught:
        second.announce(other, 30)
    assert str(caught.value) == (
        f"rollout-0 is tandem 9.9, protocol 9, and coordinator at 10.0.0.1:5, of the same run, is {release()}: "
        "use images of one release"
    )
    assert first.list("rollout") == []  # it has not stayed
    first.withdraw()
    second.announce(other, 30)
    assert second.list("rollout") == [other]


def settings() -> AgreedSettings:
    return AgreedSettings({"grpo.temperature": "1.0", "run.seed": "0"})


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of a service that lives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_service_with_another_configuration_is_refused_by_name(
    redis_server: str, open_registry: OpenRegistry, listening: str
) -> None:
    first = open_registry(redis_server, settings=settings())
    second = open_registry(redis_server, settings=AgreedSettings({"grpo.temperature": "0.7", "run.seed": "0"}))
    first.announce(record("coordinator", "w1", role="coordinator", address=listening), 30)
    with pytest.raises(ConfigurationSkew) as caught:
        second.announce(record(), 30)
    assert str(caught.value).startswith(
        f"rollout-0 has read another configuration than coordinator at {listening}, of the same run: "
        "grpo.temperature: 0.7 here, 1.0 there: restart the services that have the old one"
    )
    assert first.list("rollout") == []  # it has not stayed
    first.withdraw()
    second.announce(record(), 30)
    assert [each.settings for each in second.list("rollout")] == [second.settings_digest]


def test_services_that_were_killed_or_say_nothing_agree_with_all(
    redis_server: str, open_registry: OpenRegistry, listening: str
) -> None:
    killed = open_registry(redis_server, settings=settings())
    killed.announce(record("rollout-1", "w1", address="127.0.0.1:1"), 30)
    silent = open_registry(redis_server)
    silent.announce(record("rollout-2", "w2", address=listening), 30)
    own = open_registry(redis_server, settings=AgreedSettings({"run.seed": "7"}))
    own.announce(record(), 30)
    again = open_registry(redis_server)  # beside `own`, which says something
    again.announce(record("rollout-3", "w3"), 30)


def test_settings_that_cannot_be_read_are_told_apart_by_their_digests(
    redis_server: str, open_registry: OpenRegistry
) -> None:
    registry = open_registry(redis_server, settings=settings())
    told = f"the digest of its settings is {'f' * 12}, here it is {registry.settings_digest[:12]}"
    assert registry.explain_settings("f" * 64) == told
    registry.set_value(f"settings:{'f' * 64}", "[]")
    assert registry.explain_settings("f" * 64) == told
    many = AgreedSettings({str(number): "1" for number in range(12)})
    registry.set_value("settings:m", many.to_json())
    assert registry.explain_settings("m").endswith("; and 6 more")


def test_its_own_earlier_record_is_no_other_release(redis_server: str, open_registry: OpenRegistry) -> None:
    owner = open_registry(redis_server)
    owner.announce(record(), 30)
    owner.announce(dataclasses.replace(record(), release="tandem 9.9, protocol 9"), 30)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"release": None}, "of a release that does not say"),
        ({"release": "tandem 9.9, protocol 9", "color": "red"}, "tandem 9.9, protocol 9"),
    ],
)
def test_records_of_older_and_newer_releases_can_be_read(
    redis_server: str, open_registry: OpenRegistry, change: dict[str, str | None], told: str
) -> None:
    registry = open_registry(redis_server)
    registry.announce(record(), 30)
    fields = {key: value for key, value in {**dataclasses.asdict(record()), **change}.items() if value is not None}
    connect(redis_server).set("tandem:run-1:service:rollout:rollout-0", json.dumps(fields))
    assert [each.release for each in registry.list("rollout")] == [told]


def test_why_a_service_has_ended_is_known_until_it_is_back(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    assert registry.failures() == []
    for name, reason in (("rollout-1", "no GPU"), ("rollout-1", "still no GPU"), ("rollout-10", "wrong key")):
        registry.report_failure("rollout", name, reason)
    registry.report_failure("trainer", "trainer-rank-1", "out of memory")
    told = {failure.name: failure.reason for failure in registry.failures()}
    assert told == {"rollout-1": "still no GPU", "rollout-10": "wrong key", "trainer-rank-1": "out of memory"}
    open_registry(redis_server).announce(record("rollout-1"), 30)
    open_registry(redis_server).announce(record("trainer", role="trainer"), 30)
    assert [failure.name for failure in registry.failures()] == ["rollout-10"]


def test_who_waits_for_a_service_hears_why_it_ended(redis_server: str, open_registry: OpenRegistry) -> None:
    registry = open_registry(redis_server)
    registry.report_failure("rollout", "rollout-1", "no GPU")
    registry.report_failure("trainer", "trainer", "not of interest here")
    with pytest.raises(DeadlineExceeded, match=r"rollout-1; there is none; rollout-1 ended \d+ s ago: no GPU$"):
        registry.wait_for("rollout", ["rollout-1"], 0.05)


def test_a_failure_is_told_as_well_as_it_can_be(redis_server: str, open_registry: OpenRegistry) -> None:
    environ = {"REDIS_URL": redis_server, "TANDEM_RUN_ID": "run-1"}
    record_failure("trainer", "trainer", "out of memory", environ)
    assert str(open_registry(redis_server).failures()[0]).endswith("ago: out of memory")
    for incomplete in ({}, {"REDIS_URL": "redis://127.0.0.1:1", "TANDEM_RUN_ID": "run-1"}, {"REDIS_URL": redis_server}):
        record_failure("trainer", "trainer", "nobody hears", incomplete)
    assert len(open_registry(redis_server).failures()) == 1


def test_nothing_is_announced_by_a_registry_that_is_closed(redis_server: str, open_registry: OpenRegistry) -> None:
    """As when a process is stopped while a thread announces it."""
    registry, other = open_registry(redis_server), open_registry(redis_server)
    registry.close()
    with pytest.raises(Aborted):
        registry.announce(record(), 30)
    assert other.list("rollout") == []


@pytest.mark.parametrize("wait", ["name", "services", "value"])
def test_a_wait_ends_with_the_registry_in_the_middle_of_a_redis_call_too(
    redis_server: str, open_registry: OpenRegistry, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """redis-py raises ValueError where another thread has closed the connection that it reads from."""
    registry = open_registry(redis_server)

    def closed_meanwhile(*_: object) -> None:
        registry.close()
        raise ValueError("I/O operation on closed file.")

    for call in ("_put", "list", "get_value"):
        monkeypatch.setattr(registry, call, closed_meanwhile)
    waits: dict[str, Callable[[], object]] = {
        "name": lambda: registry.announce(record(), 30),
        "services": lambda: registry.wait_for("rollout", 1, 30),
        "value": lambda: registry.wait_value("store", 30),
    }
    with pytest.raises(Aborted, match="registry was closed"):
        waits[wait]()
