"""What the configuration accepts for sampling, a replica takes; what a replica refuses, it names first."""

import pytest

from rollout_service.engine import EngineLimits
from rollout_service.sampling import read_sampling
from servicekit.errors import InvalidRequest
from servicekit.rpc.request_bounds import check_request
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from tandem_config.schema import RunConfig
from tools.bench_sync.whole_groups import prompt_group

MINIMAL = ["model.path=m", "data.train=rows.jsonl", "rollout.max_total_tokens=100000000"]
LIMITS = EngineLimits(vocab_size=2**31, longest_request=2**25, kv_tokens=2**25)
# By setting: the ends that both take, and values just beyond them that both refuse.
BOUNDS = {
    "grpo.temperature": (("0.001", "1.0", "100.0"), ("1.0e-7", "0.0009", "100.1", "200.0", "0.0", "-1.0")),
    "grpo.max_new_tokens": (("1", "16777216"), ("0", "16777217")),
    "grpo.stop_token_ids": (("[0, 2147483647]",), ("[2147483648]", "[-1]")),
    "temperature": (("0.0", "0.001", "100.0"), ("1.0e-7", "0.0009", "100.1", "-1.0")),
    "top_p": (("1.0e-6", "1.0"), ("0.0", "1.0e-60", "1.1")),
    "top_k": (("-1", "1", "2147483647"), ("0", "-2", "2147483648")),
    "min_p": (("0.0", "1.0"), ("-0.1", "1.1")),
    "repetition_penalty": (("0.001", "2.0"), ("0.0", "1.0e-60", "2.1")),
    "max_new_tokens": (("1", "16777216"), ("0", "16777217")),
}


def loaded(key: str, text: str) -> RunConfig:
    if key.startswith("grpo."):
        return load_config(None, [*MINIMAL, f"{key}={text}"])
    return load_config(None, [*MINIMAL, f"evaluation.sets=[{{name: a, data: h.jsonl, {key}: {text}}}]"])


def asked(config: RunConfig) -> pb.GenerateRequest:
    """The request of the first evaluation set, or of training."""
    chosen, grpo = next(iter(config.evaluation.sets), None), config.grpo
    sampling = pb.SamplingParams(
        temperature=grpo.temperature if chosen is None else chosen.temperature,
        top_p=1.0 if chosen is None else chosen.top_p,
        top_k=-1 if chosen is None else chosen.top_k,
        min_p=0.0 if chosen is None else chosen.min_p,
        repetition_penalty=1.0 if chosen is None else chosen.repetition_penalty,
        max_new_tokens=grpo.max_new_tokens if chosen is None else chosen.max_new_tokens or grpo.max_new_tokens,
        stop_token_ids=grpo.stop_token_ids,
    )
    return pb.GenerateRequest(groups=[prompt_group("g", [1])], sampling=sampling)


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, (good, _) in BOUNDS.items() for text in good])
def test_a_replica_takes_what_the_configuration_takes(key: str, text: str) -> None:
    request = asked(loaded(key, text))
    check_request(request)
    settings = read_sampling(request.sampling, LIMITS)
    if "repetition" in key:  # 0 on the wire would be read as none
        assert settings.repetition_penalty == pytest.approx(float(text))


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, (_, bad) in BOUNDS.items() for text in bad])
def test_the_configuration_names_what_a_replica_refuses(key: str, text: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        loaded(key, text)
    (problem,) = raised.value.problems
    assert problem.key == (key if key.startswith("grpo.") else "evaluation.sets")
    assert problem.message
    assert problem.suggestion


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("grpo.group_size=65537", "must be at most 65536"),
        ("grpo.prompts_per_iteration=8388609", "must be at most 8388608"),
        ("grpo.updates_per_iteration=1048577", "must be at most 1048576"),
        ("run.seed=18446744073709551616", "must be at most"),
    ],
)
def test_sizes_that_no_service_takes_are_named(option: str, says: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load_config(None, [*MINIMAL, option])
    assert says in raised.value.problems[0].message


def test_temperatures_that_are_not_numbers_are_refused_by_both() -> None:
    for text in (".nan", ".inf"):
        with pytest.raises(ConfigErrors):
            loaded("grpo.temperature", text)
        request = asked(load_config(None, MINIMAL))
        request.sampling.temperature = float(text.replace(".", ""))
        with pytest.raises(InvalidRequest):
            read_sampling(request.sampling, LIMITS)
