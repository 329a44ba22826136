"""A replica refuses what its ranks would refuse, by name, before it starts any of them or imports SGLang."""

import asyncio
import json
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine import host
from rollout_service.sglang_engine.host import SglangProcesses
from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig
from tests.kit.folders import CONFIG


@pytest.mark.parametrize(
    ("entries", "rollout", "named"),
    [
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantized"),
        ({"intermediate_size": 13}, {"tensor_parallel": 2}, "FFN size = 13"),
    ],
)
def test_a_model_that_ranks_would_refuse_starts_none(
    entries: dict[str, Any], rollout: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | entries))
    config = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "rollout": rollout})

    with pytest.raises(ConfigError, match=named):
        start(config, tmp_path)


def test_an_environment_without_tandems_plug_in_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "t"}})
    monkeypatch.setattr(host, "entry_points", lambda group: EntryPoints())
    with pytest.raises(ConfigError, match=r"without Tandem's hooks.*not installed in this environment"):
        start(config, tmp_path)


def start(config: RunConfig, run_dir: Path) -> None:
    async def start_and_end() -> None:
        processes = SglangProcesses(
            config, "rollout-0", HostRanks(), redis_url="", group="g", host="127.0.0.1", run_dir=run_dir
        )
        try:
            await processes.start()
        finally:
            await processes.shutdown()

    asyncio.run(start_and_end())
