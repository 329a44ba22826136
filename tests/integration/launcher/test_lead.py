"""The launcher gives the lead up in place of a coordinator that it has seen end, and that of no other."""

from pathlib import Path
from typing import Any

import pytest

from launcher.run.run import WORKER_ID, _give_lead_up, _named
from launcher.run.supervisor import ProcessSpec
from servicekit.errors import AlreadyExists
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import Rendezvous

TTL_S = 60.0


class FakeView:
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


async def test_the_lead_of_the_process_that_has_ended_is_free_and_no_others_is(redis_server: str) -> None:
    view: Any = FakeView()
    (spec,) = _named([ProcessSpec(name="coordinator", command=[], log=Path("none.log"))])
    group = Rendezvous(redis_server, "tandem:lead")
    ended = CoordinatorLease(group, TTL_S, worker_id=spec.env[WORKER_ID])
    ended.claim(0.0)
    ended._lease.stop()  # as a killed process, which gives nothing up
    second = CoordinatorLease(group, TTL_S)
    await _give_lead_up(redis_server, "lead", "0" * 32, view)
    with pytest.raises(AlreadyExists):
        second.claim(0.0)
    await _give_lead_up(redis_server, "lead", spec.env[WORKER_ID], view)
    second.claim(0.0)
    await _give_lead_up(redis_server, "lead", spec.env[WORKER_ID], view)
    second.hold()
    assert second.fence.token > ended.fence.token
    second.close()
    assert view.warnings == []


async def test_without_redis_the_next_one_waits(redis_server: str) -> None:
    view: Any = FakeView()
    await _give_lead_up("redis://127.0.0.1:1/0", "lead", "0" * 32, view)
    assert "waits for the lease" in view.warnings[0]


def test_each_start_has_a_name_of_its_own_and_only_the_coordinator_has_one() -> None:
    specs = [ProcessSpec(name=name, command=[], log=Path("none.log")) for name in ("trainer-0", "coordinator")]
    first, again = _named(specs), _named(specs)
    assert WORKER_ID not in first[0].env
    assert first[1].env[WORKER_ID] != again[1].env[WORKER_ID]
