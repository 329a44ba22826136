"""A real rank of SGLang that dies while it starts, or runs without Tandem: the service ends, and says why."""

import asyncio
import json
from pathlib import Path

import pytest

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine import host
from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig
from tests.kit.models import make_model
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]


def test_the_ranks_own_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model")
    spec = ModelSpec.from_folder(folder)
    entries = json.loads((folder / "config.json").read_text()) | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(entries))
    # The gate before it would refuse this model.
    monkeypatch.setattr(host, "_read_model", lambda config: spec)
    config = RunConfig.model_validate({"model": {"path": str(folder), "dtype": "float32"}, "data": {"train": "t"}})

    with pytest.raises(RuntimeError, match=r"did not start: ValueError: Unsupported activation: gelu"):
        start(config, tmp_path)


def test_ranks_without_tandems_hooks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a GPU: the replica was announced, and waited for weights that no rank could take."""
    folder = make_model(tmp_path / "model")
    config = RunConfig.model_validate({"model": {"path": str(folder), "dtype": "float32"}, "data": {"train": "t"}})
    monkeypatch.setenv("SGLANG_PLUGINS", "tandem_cpu")
    with pytest.raises(ConfigError, match=r"ranks run without Tandem's hooks.*SGLANG_PLUGINS"):
        start(config, tmp_path)


def start(config: RunConfig, run_dir: Path) -> None:
    async def start_and_end() -> None:
        processes = host.SglangProcesses(
            config, "rollout-0", HostRanks(), redis_url="", group="g", host="127.0.0.1", run_dir=run_dir
        )
        try:
            await processes.start()
        finally:
            await processes.shutdown()

    asyncio.run(start_and_end())
