"""A replica that joins and dies all the time makes an epoch each time; those that it does not concern publish on."""

import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, RUN_ID, ChaosFleet
from weightsync.membership.rendezvous import Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PUBLICATIONS = 4
# Between two changes of the stranger's slot: a round's PREPARE takes longer, so that each would meet some.
LONGEST_S = 0.03


@contextmanager
def flapping(fleet: ChaosFleet, slot: str) -> Iterator[list[int]]:
    """Let a stranger take a slot and leave it again and again. Yields: the epochs that it has made."""
    group, over, epochs = Rendezvous(fleet.redis.url, f"tandem:{RUN_ID}"), threading.Event(), list[int]()
    moments = random.Random(slot)

    def flap() -> None:
        while not over.wait(moments.uniform(0.0, LONGEST_S)):
            worker = uuid.uuid4().hex
            epochs.append(group.join(slot, worker, 10.0))
            over.wait(moments.uniform(0.0, LONGEST_S))
            group.leave(slot, worker)

    thread = threading.Thread(target=flap, name="flapping")
    thread.start()
    try:
        yield epochs
    finally:
        over.set()
        thread.join()


def test_publications_beside_a_replica_that_joins_and_leaves_need_no_second_try(fleets: Fleets) -> None:
    with fleets.whole() as fleet, flapping(fleet, "rollout-9/0") as epochs:
        for number in range(PUBLICATIONS):
            begun = len(epochs)
            fleet.train_step()
            said = fleet.publish()
            print(said.get("attempts"), said.get("total_s"))
            assert (said.get("attempts"), said.get("serving")) == (1, list(REPLICAS)), said
            assert len(epochs) > begun, number
