"""A real engine of one rank, for tests of whole steps."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tandem_config.schema import RunConfig
from tests.integration.trainer.reference import CONFIG
from tests.kit.models import save_model

# Beside these, the terms of reference.CONFIG.
KL = {"kl_coefficient": 0.1, "entropy_coefficient": 0.0, "correction": "none", "correction_high": None}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy`, `other` (the same sizes), `tied` (not the same)."""
    folder = tmp_path_factory.mktemp("models")
    save_model("qwen3-moe", folder / "policy")
    save_model("qwen3-moe", folder / "other", seed=1)
    save_model("qwen2-tied", folder / "tied")
    return folder


@pytest.fixture
def make_engine(one_rank: None, models: Path) -> Iterator[Callable[..., Any]]:
    """Make engines, one after the other, which have loaded `policy`."""
    from trainer_service.megatron_engine.engine import MegatronEngine  # prepares megatron for CPUs

    with ExitStack() as stack:

        def engine(
            dtype: str = "float32",
            *,
            optimizer: bool = True,
            offload: Sequence[str] = (),
            trainer: Mapping[str, Any] = MappingProxyType({}),
            profile: Mapping[str, Any] = MappingProxyType({}),
            run_dir: Path | None = None,
            **grpo: Any,
        ) -> MegatronEngine:
            stack.close()
            paths = {name: models / value for name, value in grpo.items() if name == "reference_path"}
            sections = {
                "model": {"path": models / "policy", "dtype": dtype},
                "trainer": CONFIG["trainer"]
                | {"checkpoint_optimizer": optimizer, "offload": dict.fromkeys(offload, True)}
                | trainer,
                "grpo": CONFIG["grpo"] | KL | grpo | paths,
                "profile": dict(profile),
            }
            made = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"), run_dir)
            stack.callback(made.close)
            made.load(models / "policy")
            return made

        yield engine
    # by itself Python would wait for a quarter as many new objects as there are, and keep 48 threads for each engine
    gc.collect()
