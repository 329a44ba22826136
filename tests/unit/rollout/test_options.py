from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.engine import SglangEngine
from rollout_service.sglang_engine.options import (
    cpu_binding,
    engine_arguments,
    engine_environment,
    model_arguments,
    warm_up_sampling,
)
from rollout_service.sglang_engine.receiver import ReceiverSettings
from tandem_config.schema import RunConfig
from tests.kit.stores import tiny_spec
from tests.unit.rollout.fake_engine import FakeEngine


def config(max_prompt_tokens: int = 1024, **rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "/m"}, "data": {"train": "t", "max_prompt_tokens": max_prompt_tokens}, "rollout": rollout}
    )


def arguments(
    configured: RunConfig, name: str = "rollout-0", cuda: bool = False, dtype: str = "float32"
) -> dict[str, object]:
    model = configured.model.model_copy(update={"dtype": dtype})
    return engine_arguments(configured.model_copy(update={"model": model}), name, HostRanks(), cuda)


def test_a_gpu_keeps_sglangs_own_backends_but_for_kernels_that_change_the_weights() -> None:
    on_gpu, on_cpu = (arguments(config(), cuda=cuda, dtype="bfloat16") for cuda in (True, False))
    assert {"device", "attention_backend", "sampling_backend"}.isdisjoint(on_gpu)
    assert on_gpu["moe_runner_backend"] == "triton"
    assert on_gpu["enable_fp32_lm_head"] is True  # as the trainer's (head/logprobs.py)
    assert (on_cpu["device"], on_cpu["attention_backend"]) == ("cpu", "torch_native")
    assert on_gpu["mem_fraction_static"] == 0.8


def test_float32_on_a_gpu_gets_an_attention_that_computes_in_it() -> None:
    assert arguments(config(), cuda=True, dtype="float32")["attention_backend"] == "triton"


def test_the_kv_cache_is_sglangs_own_on_gpus_and_a_number_on_cpus() -> None:
    assert arguments(config(), cuda=True)["max_total_tokens"] is None
    assert arguments(config())["max_total_tokens"] == 65536
    assert arguments(config(40000))["max_total_tokens"] == 2 * (40000 + 256)
    sets = [{"name": "long", "data": "e", "max_new_tokens": 70000}]
    long_set = RunConfig.model_validate({"model": {"path": "/m"}, "data": {"train": "t"}, "evaluation": {"sets": sets}})
    assert arguments(long_set)["max_total_tokens"] == 2 * (1024 + 70000)
    for cuda in (True, False):
        assert arguments(config(max_total_tokens=4096), cuda=cuda)["max_total_tokens"] == 4096


@pytest.mark.parametrize(("running", "graphs"), [(1024, 512), (512, 512), (300, 300), (1, 1)])
def test_a_decode_batch_has_a_graph_as_far_as_that_pays(running: int, graphs: int) -> None:
    """On 80 GB SGLang's own limit is 256 requests."""
    found = arguments(config(max_running_requests=running), cuda=True)
    assert found["cuda_graph_max_bs_decode"] == graphs
    assert "cuda_graph_max_bs_decode" not in arguments(config(max_running_requests=running))


def test_a_request_leaves_a_page_of_the_cache_free() -> None:
    """SGLang's page is 64 tokens on Blackwell."""
    engine: Any = SglangEngine.__new__(SglangEngine)
    engine._tokenizer = Path("/nowhere/tokenizer.json")
    started: Any = SimpleNamespace(
        _scheduler_init_result=SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 1024}]),
        server_args=SimpleNamespace(resolved_dict=lambda: {"page_size": 64}),
    )
    engine._processes = SimpleNamespace(engine=started)
    engine.manager = SimpleNamespace(context_len=4096, model_config=SimpleNamespace(vocab_size=100))
    limits = engine._read_limits()
    assert (limits.longest_request, limits.why_no_stop) == (960, "/nowhere/tokenizer.json does not exist")


def test_short_prompts_do_without_a_prefix_cache() -> None:
    assert arguments(config(16))["disable_radix_cache"]
    assert not arguments(config(512))["disable_radix_cache"]
    assert arguments(config(512, context_length=64))["disable_radix_cache"]


def test_sglang_serves_sequences_as_long_as_yarn_makes_them() -> None:
    scalings = [{"rope_scaling": {"type": kind, "factor": 4.0}} for kind in ("yarn", "linear", "dynamic")]
    found = [model_arguments(tiny_spec("qwen2", **entries)) for entries in ({}, *scalings)]
    assert found == [{}, {"json_model_override_args": '{"max_position_embeddings": 256}'}, {}, {}]


def test_replicas_sample_from_different_seeds() -> None:
    seeds = {arguments(config(), name)["random_seed"] for name in ("rollout-0", "rollout-1")}
    assert len(seeds) == 2


def test_ranks_meet_through_a_file_of_their_replica(tmp_path: Path) -> None:
    variables = engine_environment(config(), HostRanks(), "127.0.0.1", tmp_path, True)
    assert variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/ranks"


def test_ranks_of_several_hosts_meet_at_the_leaders_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    share = HostRanks(host=1, nodes=2, tensor_parallel=4, store="127.0.0.1:4711")
    variables = engine_environment(config(tensor_parallel=4, nodes=2), share, "127.0.0.2", tmp_path, False)
    assert variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "env://"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert (variables["SGLANG_HOST_IP"], variables["GLOO_SOCKET_IFNAME"]) == ("127.0.0.2", "lo")
    assert len(variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    found = engine_arguments(config(tensor_parallel=4, nodes=2), "rollout-0", share, False)
    assert (found["tp_size"], found["nnodes"], found["node_rank"]) == (4, 2, 1)


def test_the_users_interface_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "rdma0")
    share = HostRanks(nodes=2, tensor_parallel=2, store="127.0.0.1:4711")
    assert engine_environment(config(), share, "127.0.0.1", tmp_path, True)["GLOO_SOCKET_IFNAME"] == "rdma0"


def test_a_warm_up_samples_in_each_way_of_the_run() -> None:
    sets = [
        {"name": "a", "data": "t", "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"name": "b", "data": "t", "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"name": "c", "data": "t", "temperature": 1.0, "min_p": 0.05},
    ]
    given = {"model": {"path": "/m"}, "data": {"train": "t", "heldout": "h"}, "evaluation": {"sets": sets}}
    found = warm_up_sampling(RunConfig.model_validate(given))
    ways = [(each.temperature, each.top_p, each.top_k, each.min_p) for each in found]
    assert ways == [(1.0, 1.0, -1, 0.0), (0.0, 1.0, -1, 0.0), (0.6, 0.95, 20, 0.0), (1.0, 1.0, -1, 0.05)]
    assert {each.max_new_tokens for each in found} == {2}


async def test_an_engine_is_warm_when_it_has_sampled_in_each() -> None:
    engine: Any = SglangEngine.__new__(SglangEngine)
    asked: list[object] = []

    def open_stream(sampling: object) -> object:
        asked.append(sampling)
        return FakeEngine().open_stream(warm_up_sampling(config())[0])

    engine.open_stream = open_stream
    engine._sampling = ["plain", "top-p"]
    await engine._warm_up()
    assert asked == ["plain", "top-p"]


async def test_an_engine_that_is_not_warm_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SglangEngine.__new__(SglangEngine)

    held = FakeEngine()
    held.hold()
    monkeypatch.setattr("rollout_service.sglang_engine.engine.WARM_UP_S", 0.01)
    engine.open_stream, engine._sampling, engine._name = (
        lambda _: held.open_stream(warm_up_sampling(config())[0]),
        ["plain", "top-p"],
        "rollout-3",
    )
    with pytest.raises(RuntimeError, match=r"replica rollout-3 within 0.01 s: .* sampling was plain"):
        await engine._warm_up()


def test_only_engines_on_gpus_compile(tmp_path: Path) -> None:
    on_gpu, on_cpu = (engine_environment(config(), HostRanks(), "127.0.0.1", tmp_path, cuda) for cuda in (True, False))
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in on_gpu


def test_each_rank_gets_a_core_and_the_users_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5, 7})
    assert cpu_binding(range(2), {}) == "3|5"
    assert cpu_binding(range(2, 4), {}) == "7|3"
    assert cpu_binding(range(2), {"SGLANG_CPU_OMP_THREADS_BIND": "0-3|4-7"}) == "0-3|4-7"


def test_receiver_settings_travel_by_environment() -> None:
    settings = ReceiverSettings(
        dir="/tmp/x",
        replica="rollout-1",
        model="/m",
        tokenizer="/t",
        redis_url="redis://r",
        group="g",
        host="h",
        disk_folder="/run/weights",
        lease_ttl_s=2.5,
    )
    assert ReceiverSettings.from_env(settings.to_env()) == settings
    assert ReceiverSettings.from_env({"PATH": "/bin"}) is None
    assert settings.address(3) == "unix:/tmp/x/rank3.sock"
