"""A Redis that is away, empty or unwilling for a while ends nothing, with the lease that a run has by default."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_config.schema import RunConfig, SyncSection
from tandem_files.ledger.life import read_life
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.kit.redis import RedisProcess
from tests.kit.waiting import throughout, until

DEFAULTS = SyncSection()
DEADLINE_S = 90.0
# The ranks' leases: they are back before the coordinator is, whose lease is the default one.
RANKS_TTL_S = 3.0


class Running:
    """A run on its way, and the Redis that it uses."""

    def __init__(self, environment: ServiceEnvironment, server: RedisProcess) -> None:
        self.environment, self.server = environment, server
        self.group = f"{{tandem:{environment.run_id}}}"

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.url, decode_responses=True)

    async def goes_on(self) -> None:
        """Returns after three more iterations. Raises: AssertionError: it does not go on."""
        before = self._num_rows()
        await asyncio.to_thread(until, lambda: self._num_rows() >= before + 3, DEADLINE_S)

    def _num_rows(self) -> int:
        return len(rows(self.environment)) if (self.environment.run_dir / "metrics.jsonl").exists() else 0


@asynccontextmanager
async def running(config: RunConfig, environment: ServiceEnvironment, server: RedisProcess) -> AsyncIterator[Running]:
    """The run ends with the block, and must not have ended before: its iterations are all there."""
    environment = environment.model_copy(update={"redis_url": server.url})
    config = with_settings(
        config, run={"iterations": 1_000_000, "evaluate_every": 1_000_000}, sync=DEFAULTS.model_dump()
    )
    stop = asyncio.Event()
    async with announced_fleet(server.url, environment.run_id, ttl_s=RANKS_TTL_S):
        run = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        it = Running(environment, server)
        await it.goes_on()
        yield it
        assert not run.done(), saved_state(environment)["error"]
        stop.set()
        assert await asyncio.wait_for(run, DEADLINE_S) == 0
    table = rows(environment)
    assert [row["iteration"] for row in table] == list(range(1, len(table) + 1))
    assert saved_state(environment)["status"] == "interrupted"


async def test_a_coordinator_whose_slot_is_empty_takes_it_again(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    """As after an outage of more than a lease that the ranks were quicker to notice."""
    async with running(config, environment, redis_process()) as run:
        with run.client() as client:
            for _ in range(3):
                client.hdel(f"{run.group}:members", "coordinator")
                client.zrem(f"{run.group}:leases", "coordinator")
                await run.goes_on()
                assert client.hget(f"{run.group}:members", "coordinator")


async def test_a_redis_that_comes_back_empty_ends_nothing(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    async with running(config, environment, redis_process()) as run:
        await asyncio.to_thread(away, run.server, 3.0)
        await run.goes_on()
    lost, back = [entry for entry in read_life(environment.run_dir, 50) if entry.who == "redis"]
    assert (lost.kind, back.kind) == ("redis lost", "redis back")
    assert back.seconds is not None
    assert back.seconds > 1.0


@pytest.mark.slow
async def test_a_redis_that_comes_back_with_its_data_after_all_leases_ends_nothing(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    async with running(config, environment, redis_process(append_only=True)) as run:
        await asyncio.to_thread(away, run.server, DEFAULTS.lease_ttl_s + 3.0)
        await run.goes_on()


async def test_rules_that_refuse_us_for_a_while_end_nothing(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    async with running(config, environment, redis_process()) as run:
        with run.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-evalsha")
            # Every lease is renewed once, at least, while it is refused.
            await asyncio.to_thread(throughout, lambda: True, DEFAULTS.lease_ttl_s / 3 + 1.0)
            client.execute_command("ACL", "SETUSER", "default", "+evalsha")
            await run.goes_on()


def away(server: RedisProcess, seconds: float) -> None:
    server.kill()
    throughout(lambda: True, seconds)
    server.start()


async def test_every_key_of_a_run_goes_by_itself(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    """A week after the last word: longer than any run waits for its Redis or its processes."""
    async with running(config, environment.model_copy(update={"web_port": 0}), redis_process()) as run:
        with run.client() as client:
            lifetimes = {key: client.ttl(key) for key in client.keys("*")}
    assert {key.rpartition(":")[2] for key in lifetimes} >= {"members", "leases", "state", "facts", "page_url"}
    assert all(0 < seconds <= 7 * 86_400 for seconds in lifetimes.values()), lifetimes


def _list_at(key: str) -> Callable[[redis.Redis], object]:
    def write(client: redis.Redis) -> None:
        with client.pipeline(transaction=True) as both:  # the run writes the key anew between two calls
            both.delete(key)
            both.rpush(key, "x")
            both.execute()

    return write


def _with_field(field: str, text: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.hset("{tandem:t}:state", field, text)


def _without_field(field: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.hdel("{tandem:t}:state", field)


def _without_key(key: str) -> Callable[[redis.Redis], object]:
    return lambda client: client.delete(key)


# What another program writes, and what a person does about it; {g}: the group's prefix, {r}: the registry's.
DAMAGES: dict[str, tuple[Callable[[redis.Redis], object], Callable[[redis.Redis], object]]] = {
    f"{field} is {text!r}": (
        _with_field(field, text),
        _without_field(field),
    )
    for field, text in (("epoch", "abc"), ("token", "-1"), ("endpoint", "nowhere"), ("endpoint_epoch", "x"))
} | {
    key: (_list_at(key), _without_key(key))
    for key in (
        *(f"{{tandem:t}}:{name}" for name in ("members", "leases", "state", "facts")),
        *(
            f"tandem:t:{name}"
            for name in ("names:rollout", "names:trainer", "failures", "service:coordinator:coordinator")
        ),
    )
}
GHOSTS = ("{", "[]", "null", '{"address": 5}', '{"name": 1}', b"\xff" * 10)


async def test_what_another_program_writes_into_our_keys_ends_nothing(
    config: RunConfig, environment: ServiceEnvironment, redis_process: Callable[..., RedisProcess]
) -> None:
    """Records that cannot be read are left out at once; the rest is waited for until somebody repairs it."""
    async with running(config, environment, redis_process()) as run:
        with run.client() as client:
            for number, text in enumerate(GHOSTS):
                for role, name in (("rollout", f"rollout-{7 + number}"), ("trainer", f"x{number}")):
                    client.set(f"tandem:t:service:{role}:{name}", text)
                    client.sadd(f"tandem:t:names:{role}", name)
                client.set(f"tandem:t:failure:rollout:{number}", text)
                client.sadd("tandem:t:failures", f"rollout:{number}", "x")
            await run.goes_on()
            for damage, repair in DAMAGES.values():
                damage(client)
                await asyncio.to_thread(throughout, lambda: True, RANKS_TTL_S / 3 + 0.2)  # every rank notices
                repair(client)
                await run.goes_on()
