from types import SimpleNamespace

import pytest

from rollout_service.sglang_engine.scheduler.flips import begun_first


@pytest.mark.parametrize(("mode", "order"), [("retract", "bdac"), ("in_place", "abcd")])
def test_what_is_retracted_waits_before_what_has_not_begun(mode: str, order: str) -> None:
    queue = [SimpleNamespace(name=name, retraction_count=name in "bd") for name in "abcd"]
    begun_first(None, SimpleNamespace(waiting_queue=queue), SimpleNamespace(mode=mode))
    assert "".join(request.name for request in queue) == order
