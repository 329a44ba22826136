"""The example reward model: a real SGLang engine with a classification head gives transformers' scores."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

from coordinator.learn.rewards.base import ScoredText
from coordinator.learn.rewards.servers.remote import RemoteScores
from tandem_config.sections.reward_servers import RemoteReward
from tests.house.repository import REPO
from tests.kit.folders import write_tokenizer
from tests.kit.processes import END_S, START_S, free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WORDS = ["<unk>", "<s>", "</s>", *"0123456789+-= abcdefgh"]
TEXTS = [("1+2=", "3"), ("1+2=", "4"), ("12+34=", "46 abc"), ("abc", "hgfedcba" * 12), ("", "7")]


def write_reward_model(folder: Path) -> None:
    """A tiny LlamaForSequenceClassification with one label, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        max_position_embeddings=512,
    )  # fmt: skip
    LlamaForSequenceClassification(config).float().save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def expected(folder: Path, texts: Sequence[str]) -> list[float]:
    """The scores of transformers, one text at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = [[WORDS.index(character) for character in text] for text in texts]
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in ids]


def started(command: list[str], environ: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=environ, stderr=log, stdout=log)


@pytest.mark.runs("python examples/reward_model/server.py")
async def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    folder, port = tmp_path / "model-7", free_port()
    write_reward_model(folder)
    items = [
        ScoredText(completion=completion, answer="", truncated=False, prompt=prompt, sample_id=f"i0.g0.row1#{place}")
        for place, (prompt, completion) in enumerate(TEXTS)
    ]
    wanted = expected(folder, [prompt + completion for prompt, completion in TEXTS])
    assert max(wanted) - min(wanted) > 0.1
    environ = os.environ | {"TANDEM_GRPC_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPO / "examples/reward_model/server.py"), str(folder)]
    section = RemoteReward(kind="remote", address=f"127.0.0.1:{port}", start_timeout_s=START_S, batch_size=3)
    reward = RemoteScores(section, None)
    with (tmp_path / "log").open("wb") as log, started(command, environ, log) as server:
        try:
            await reward.start([])
            scores = await reward.score(items)
            assert scores.errors == {}
            assert scores.values == pytest.approx(wanted, abs=1e-4)
            server.send_signal(signal.SIGTERM)
            assert server.wait(END_S) == 0
        finally:
            await reward.close()
            server.kill()
