"""Which rank is to blame: what rank 0 finds out from the beats and reports of the others."""

import threading

import pytest
import torch.distributed as dist

from trainer_service.ranks import liveness
from trainer_service.ranks.liveness import Liveness

BEAT_S = 0.25


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(liveness, "BEAT_S", BEAT_S)
    monkeypatch.setattr(liveness, "SILENT_S", 4 * BEAT_S)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def diagnosed(store: dist.Store, world_size: int, beat_after_s: float) -> str:
    """What rank 0 says of a lost connection; all but rank 1 beat once, so much later."""
    for rank in range(1, world_size):
        store.add(f"beat/{rank}", 1)
    threading.Timer(beat_after_s, lambda: [store.add(f"beat/{rank}", 1) for rank in range(2, world_size)]).start()
    return Liveness(store, 0, world_size).diagnose(RuntimeError("connection closed"))


def test_a_rank_that_is_slow_is_not_taken_for_the_one_that_is_lost(store: dist.Store) -> None:
    seen = "killed or hanging, without a report; seen here as RuntimeError: connection closed"
    assert diagnosed(store, 4, 5 * BEAT_S) == f"rank 1: {seen}"


def test_several_that_are_lost_are_named_in_time(store: dist.Store) -> None:
    assert diagnosed(store, 3, 60 * BEAT_S).startswith("rank 1, rank 2: killed or hanging")
