"""A rank that runs something else is refused in PREPARE by everybody, with both values, before anybody connects."""

import json

import pytest
import redis
import torch

from servicekit.errors import ConfigError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import GROUP, Fleet
from weightsync.membership.rendezvous import Rendezvous
from weightsync.transfer.facts import own_facts

pytestmark = pytest.mark.integration
SLOTS = {"trainer/0", "trainer/1", "rollout-0/0", "rollout-1/0"}


def let_it_tell(fleet: Fleet, slot: str, **changes: str) -> None:
    """The slot's holder tells something else of itself, as one of another image would."""
    facts = own_facts(torch.device("cpu")) | changes
    with redis.Redis.from_url(fleet.redis_url) as client:
        assert client.hset(f"{{{GROUP}}}:facts", slot, json.dumps(facts)) == 0  # there was something


def test_members_tell_what_they_run_until_they_leave(four: Fleet) -> None:
    group = Rendezvous(four.redis_url, GROUP)
    assert {slot: json.loads(told) for slot, told in group.facts().items()} == dict.fromkeys(
        SLOTS, own_facts(torch.device("cpu"))
    )
    four.members["rollout-1/0"].close()
    assert set(group.facts()) == SLOTS - {"rollout-1/0"}


def test_a_rank_that_differs_is_refused_by_all_at_once(four: Fleet) -> None:
    let_it_tell(four, "rollout-1/0", torch="1.4")
    # Who waited for somebody to connect would do it for hours: the test would not end.
    answers = four.run(pb.ROUND_PHASE_PREPARE, four.round(1, formation_timeout_s=10_000))
    expected = f"torch must match: rollout-1/0 has 1.4, trainer/0 has {own_facts(torch.device('cpu'))['torch']}"
    assert set(answers) == SLOTS
    for slot, answer in answers.items():
        assert isinstance(answer, ConfigError), (slot, answer)
        assert expected in str(answer)


def test_once_it_is_replaced_the_round_goes_through(four: Fleet) -> None:
    let_it_tell(four, "rollout-1/0", **{"plan format": "99"})
    refused = four.run(pb.ROUND_PHASE_PREPARE, (first := four.round(1)))
    assert all("plan format must match" in str(answer) for answer in refused.values())
    four.run(pb.ROUND_PHASE_ABORT, first)
    four.replace("rollout-1/0", four.stores["rollout-1/0"])
    four.sync(four.round(2))
