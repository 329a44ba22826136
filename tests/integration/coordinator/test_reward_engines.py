"""Real SGLang engines that score: the example reward model, and a judge behind SGLang's own OpenAI endpoint."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.rewards.base import ScoredText, Scores
from coordinator.rewards.servers.judge import JudgedScores
from coordinator.rewards.servers.remote import RemoteScores
from tandem_config.sections.rewards.servers import JudgeReward, RemoteReward
from tests.house.repository import REPO
from tests.kit.folders import write_tokenizer
from tests.kit.processes import END_S, START_S, free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SPECIAL = ["<unk>", "<s>", "</s>"]
DIGITS = [*SPECIAL, *"0123456789"]
WORDS = [*DIGITS, *"+-= abcdefgh"]
TEXTS = [("1+2=", "3"), ("1+2=", "4"), ("12+34=", "46 abc"), ("abc", "hgfedcba" * 12), ("", "7")]


def write_scoring_model(folder: Path, name: str, words: list[str]) -> Any:
    """A tiny Llama of random weights, and a tokenizer with one token per character. Returns: the model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = getattr(transformers, name)(config).float().eval()
    if name == "LlamaForCausalLM":
        with torch.no_grad():  # so that it writes no special token
            model.lm_head.weight[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    write_tokenizer(folder, words)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model


def expected(folder: Path, texts: Sequence[str]) -> list[float]:
    """The scores of transformers, one text at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = [[WORDS.index(character) for character in text] for text in texts]
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in ids]


def started(arguments: list[str], log: Path, **variables: str) -> "subprocess.Popen[bytes]":
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, *arguments], env=environ, stderr=output, stdout=output)


@pytest.mark.runs("python examples/reward_model/server.py")
async def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    folder, port = tmp_path / "model-7", free_port()
    write_scoring_model(folder, "LlamaForSequenceClassification", WORDS)
    items = [
        ScoredText(completion=completion, answer="", truncated=False, prompt=prompt, sample_id=f"i0.g0.row1#{place}")
        for place, (prompt, completion) in enumerate(TEXTS)
    ]
    wanted = expected(folder, [prompt + completion for prompt, completion in TEXTS])
    assert max(wanted) - min(wanted) > 0.1
    command = [str(REPO / "examples/reward_model/server.py"), str(folder)]
    section = RemoteReward(kind="remote", address=f"127.0.0.1:{port}", start_timeout_s=START_S, batch_size=3)
    reward = RemoteScores(section, None)
    with started(command, tmp_path / "log", TANDEM_GRPC_PORT=str(port)) as server:
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


async def test_a_judge_behind_sglangs_own_endpoint_says_what_transformers_says(tmp_path: Path) -> None:
    folder, port = tmp_path / "judge", free_port()
    model = write_scoring_model(folder, "LlamaForCausalLM", DIGITS)
    texts = ["12", "34567", "8" * 20]
    with torch.no_grad():
        ids = [torch.tensor([[DIGITS.index(digit) for digit in f"0{text}"]]) for text in texts]
        answers = [model.generate(row, max_new_tokens=4, do_sample=False)[0, -1] for row in ids]
    wanted = [int(DIGITS[int(answer)]) / 10 for answer in answers]
    section = JudgeReward(
        kind="judge", url=f"http://127.0.0.1:{port}/v1", model="judge", prompt="0{{ completion }}",
        pattern=r"(\d)", max_answer_tokens=4, start_timeout_s=START_S,
    )  # fmt: skip
    command = ["-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-total-tokens", "4096", "--served-model-name", "judge"]
    reward = JudgedScores(section)
    with started(command, tmp_path / "log") as server:
        try:
            await reward.start([])
            items = [ScoredText(completion=text, answer="", truncated=False) for text in texts]
            assert await reward.score(items) == Scores(values=wanted)
        finally:
            await reward.close()
            server.terminate()
            server.wait(END_S)
