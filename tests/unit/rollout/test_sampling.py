import math
from dataclasses import replace
from typing import Any

import pytest

from rollout_service.engine import EngineLimits, GroupRequest, SamplingSettings
from rollout_service.sampling import read_groups, read_sampling
from servicekit.errors import InvalidRequest, TandemError, TooLarge
from servicekit.rpc.limits import MAX_COMPLETIONS_PER_CALL
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tools.bench_sync.whole_groups import prompt_group

LIMITS = EngineLimits(vocab_size=100, longest_request=64, kv_tokens=64)


def read(
    request: pb.GenerateRequest, limits: EngineLimits = LIMITS, most: int = 8
) -> tuple[list[GroupRequest], SamplingSettings]:
    sampling = read_sampling(request.sampling, limits)
    return read_groups(request.groups, sampling, limits, most), sampling


def request(**changes: Any) -> pb.GenerateRequest:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4, "stop_token_ids": [1]}
    groups = changes.pop("groups", group())
    return pb.GenerateRequest(groups=groups, sampling=pb.SamplingParams(**params | changes))


def group(**changes: Any) -> list[pb.PromptGroup]:
    fields: dict[str, Any] = {"group_id": "g", "prompt_ids": [1, 2], "num_completions": 3}
    return [prompt_group(**fields | changes)]


def test_a_good_request_becomes_data() -> None:
    groups, params = read(request())
    assert [(each.group_id, each.prompt_ids, each.num_completions) for each in groups] == [("g", [1, 2], 3)]
    assert (params.temperature, params.top_k, params.stop_token_ids) == (1.0, -1, (1,))


def test_stop_texts_and_seeds_become_data() -> None:
    asked = request(stop=["</answer>"], min_p=0.5, repetition_penalty=1.25, groups=group(seed=0))
    (first,), params = read(asked)
    assert (params.stop, params.min_p, params.repetition_penalty, first.seed) == (("</answer>",), 0.5, 1.25, 0)
    (first,), params = read(request())
    assert (params.stop, params.min_p, params.repetition_penalty, first.seed) == ((), 0.0, 1.0, None)


def test_stop_texts_need_a_tokenizer() -> None:
    without = replace(LIMITS, why_no_stop="/m/tokenizer.json does not exist")
    read(request(), without)
    with pytest.raises(InvalidRequest, match=r"/m/tokenizer.json does not exist; put tokenizer.json there"):
        read(request(stop=["x"]), without)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.7, 100.0])
def test_temperatures_in_range_pass(temperature: float) -> None:
    assert read(request(temperature=temperature))[1].temperature == pytest.approx(temperature)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -0.5}, "sampling.temperature is -0.5"),
        ({"temperature": 1e-6}, "sampling.temperature is 1e-06"),
        ({"temperature": 101.0}, "sampling.temperature is 101"),
        ({"temperature": math.nan}, "sampling.temperature is nan"),
        ({"temperature": math.inf}, "sampling.temperature is inf"),
        ({"top_p": 0.0}, "sampling.top_p is 0"),
        ({"top_p": 1.5}, "sampling.top_p is 1.5"),
        ({"top_p": math.nan}, "sampling.top_p is nan"),
        ({"top_k": 0}, "sampling.top_k is 0"),
        ({"top_k": -2}, "sampling.top_k is -2"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens is 0"),
        ({"max_new_tokens": 64}, "sampling.max_new_tokens is 64; it must be from 1 to 63"),
        ({"stop_token_ids": [1, 100]}, "sampling.stop_token_ids[1] is 100"),
        ({"stop": ["a", ""]}, "sampling.stop[1] is empty"),
        ({"groups": group(group_id="")}, "groups[0].group_id is empty"),
        ({"groups": group() + group()}, "group_id 'g' occurs twice"),
        ({"groups": group(num_completions=0)}, "group 'g': num_completions is 0"),
        ({"groups": group(prompt_ids=[])}, "group 'g': prompt_ids is empty"),
        ({"groups": group(prompt_ids=[5, 100])}, "group 'g': prompt_ids[1] is 100; the vocabulary has 100 tokens"),
        ({"groups": group(prompt_ids=[1] * 61)}, "61 prompt tokens and max_new_tokens 4 are 65 tokens; at most 64"),
    ],
)
def test_each_bad_value_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(request(**changes))
    assert says in str(refused.value)


def test_the_longest_request_passes() -> None:
    read(request(groups=group(prompt_ids=[1] * 60)))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([prompt_group(str(i), [1]) for i in range(9)], "9 groups"),
        (group(num_completions=MAX_COMPLETIONS_PER_CALL + 1), "completions in one call"),
    ],
)
def test_too_much_in_one_call_is_refused(groups: list[pb.PromptGroup], says: str) -> None:
    with pytest.raises(TooLarge) as refused:
        read(request(groups=groups))
    assert says in str(refused.value)
    assert isinstance(refused.value, TandemError)
