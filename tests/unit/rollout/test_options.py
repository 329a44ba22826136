from pathlib import Path

from rollout_service.sglang_engine.options import cpu_binding, engine_arguments, engine_environment
from rollout_service.sglang_engine.receiver import ReceiverSettings
from tandem_config.schema import RunConfig


def config(max_prompt_tokens: int = 1024, **rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "/m"}, "data": {"train": "t", "max_prompt_tokens": max_prompt_tokens}, "rollout": rollout}
    )


def test_a_gpu_keeps_sglangs_own_backends() -> None:
    on_gpu, on_cpu = (engine_arguments(config(), "rollout-0", cuda) for cuda in (True, False))
    assert {"device", "attention_backend", "sampling_backend"}.isdisjoint(on_gpu)
    assert (on_cpu["device"], on_cpu["attention_backend"]) == ("cpu", "torch_native")
    assert on_gpu["mem_fraction_static"] == 0.8


def test_short_prompts_do_without_a_prefix_cache() -> None:
    assert engine_arguments(config(16), "rollout-0", False)["disable_radix_cache"]
    assert not engine_arguments(config(512), "rollout-0", False)["disable_radix_cache"]
    assert engine_arguments(config(512, context_length=64), "rollout-0", False)["disable_radix_cache"]


def test_replicas_sample_from_different_seeds() -> None:
    seeds = {engine_arguments(config(), name, False)["random_seed"] for name in ("rollout-0", "rollout-1")}
    assert len(seeds) == 2


def test_ranks_meet_through_a_file_of_their_replica(tmp_path: Path) -> None:
    variables = engine_environment(config(), tmp_path, True)
    assert variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/ranks"


def test_each_rank_gets_a_core_and_the_users_choice_wins() -> None:
    assert len(cpu_binding(3, {}).split("|")) == 3
    assert cpu_binding(2, {"SGLANG_CPU_OMP_THREADS_BIND": "0-3|4-7"}) == "0-3|4-7"


def test_receiver_settings_travel_by_environment() -> None:
    settings = ReceiverSettings(
        dir="/tmp/x", replica="rollout-1", model="/m", redis_url="redis://r", group="g", host="h", lease_ttl_s=2.5
    )
    assert ReceiverSettings.from_env(settings.to_env()) == settings
    assert ReceiverSettings.from_env({"PATH": "/bin"}) is None
    assert settings.address(3) == "unix:/tmp/x/rank3.sock"
