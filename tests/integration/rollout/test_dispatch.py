"""How a call's requests reach SGLang's scheduler, and leave it: with SGLang's own messages, kept instead of sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_service.sglang_engine.dispatch import GroupTokenizerManager, _completion

pytestmark = [pytest.mark.integration]


def manager_of(states: dict[str, Any], sent: list[Any]) -> GroupTokenizerManager:
    made = object.__new__(GroupTokenizerManager)
    made.rid_to_state = dict(states)
    made.encoder_dispatch_ready = {}
    made.enable_metrics = False
    made._dispatch_to_scheduler = sent.append
    return made


def test_a_call_is_given_up_with_one_message() -> None:
    # The scheduler looks through its whole queue for each: 65,536 messages took minutes, and the replica ended.
    sent: list[Any] = []
    states = {f"call/{i}": SimpleNamespace(dispatched=True, abort_sent=False) for i in range(100)}
    manager = manager_of(states, sent)
    manager._abort_all("call/", states)
    manager._release_req_states_on_failure(states)
    assert [(message.rid, message.abort_all) for message in sent] == [("call/", False)]
    assert set(manager.rid_to_state) == set(states), "SGLang's answers remove them"


def test_a_call_that_has_ended_aborts_nothing() -> None:
    sent: list[Any] = []
    states = {f"call/{i}": SimpleNamespace(dispatched=True, abort_sent=False) for i in range(3)}
    manager = manager_of({}, sent)
    manager._abort_all("call/", states)
    manager._release_req_states_on_failure(states)
    assert sent == []


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_token_without_a_log_prob_does_not_fail_the_call(value: float | None) -> None:
    logprobs = [(-0.5, 7, None), (value, 8, None)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": logprobs, "weight_version": "3"}
    found = _completion({"meta_info": meta, "output_ids": [7, 8]})
    assert found.token_ids == [7, 8]
    assert np.isfinite(found.logprobs).tolist() == [True, False]
    with pytest.raises(RuntimeError, match="2 tokens with log-probs"):
        _completion({"meta_info": meta | {"output_token_logprobs": logprobs[:1]}, "output_ids": [7, 8]})
