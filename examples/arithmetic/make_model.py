"""Makes what the demo starts from: the data files, and a tiny Qwen3 that adds two numbers but forgets carries.

    python -m examples.arithmetic.make_model data        writes train.jsonl and heldout.jsonl (the same bytes anywhere)
    python -m examples.arithmetic.make_model model       trains the warm start and writes model/ (two minutes)

Both are committed; this script is how they came about. The model is made from a seed; another CPU, number of threads
or version of torch may round differently and so end at slightly other weights.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.arithmetic.problems import Problem, sloppy_answer, split_problems, write_data

HERE = Path(__file__).resolve().parent
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+-*/=()<>,.? "
VOCAB_SIZE = 32  # a little more than the tokenizer has, as in most published models
PROMPT_TOKENS = 6
MAX_NEW_TOKENS = 4

MODEL_SEED = 0
STEPS = 1000
BATCH_SIZE = 256
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
IGNORED_LABEL = -100  # what transformers leaves out of the loss


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character; `tokenizers` alone can load its tokenizer.json."""
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unk, model_max_length=64
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Returns a freshly initialised Qwen3 of 447,552 float32 parameters, embeddings tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, flat, then linear decay over the second half; `step` counts from 1."""
    decay = 2 * (1 - (step - 1) / num_steps)
    return PEAK_LEARNING_RATE * min(1.0, step / WARMUP_STEPS, decay)


def demonstrations(problems: list[Problem], rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Returns [B, T] token ids of prompt, sloppy answer and <eos>, padded on the right."""
    texts = [problem.prompt + sloppy_answer(problem, rng) + "<eos>" for problem in problems]
    ids: torch.Tensor = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    return ids


def train(num_steps: int, seed: int, report: Callable[[int, float, Qwen3ForCausalLM], None]) -> Qwen3ForCausalLM:
    """Imitates the sloppy demonstrator on the training problems.

    Args:
        num_steps: optimizer steps, > 0.
        seed: of the initialisation, the batches and the demonstrator.
        report: called after each step with the step, its loss (nats per token) and the model.
    """
    rng, tokenizer, model = random.Random(seed), build_tokenizer(), build_model(seed)
    problems, _ = split_problems()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        ids = demonstrations(rng.sample(problems, BATCH_SIZE), rng, tokenizer)
        labels = ids.masked_fill(ids == PAD_ID, IGNORED_LABEL)
        labels[:, :PROMPT_TOKENS] = IGNORED_LABEL
        loss = model.train()(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.item(), model)
    return model


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, problems: list[Problem]) -> float:
    """Returns the share (0..1) of problems whose greedy completion is exactly the answer and <eos>."""
    tokenizer = build_tokenizer()
    ids: torch.Tensor = tokenizer([problem.prompt for problem in problems], return_tensors="pt").input_ids
    for _ in range(MAX_NEW_TOKENS):
        logits = model.eval()(ids, logits_to_keep=1).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    said = [text.partition("<eos>") for text in tokenizer.batch_decode(ids[:, PROMPT_TOKENS:])]
    right: list[bool] = [
        text == problem.answer and eos != "" for (text, eos, _), problem in zip(said, problems, strict=True)
    ]
    return sum(right) / len(right)


def report_progress(step: int, loss: float, model: Qwen3ForCausalLM) -> None:
    """Prints loss and held-out accuracy every 100 steps."""
    if step % 100 == 0:
        accuracy = greedy_accuracy(model, split_problems()[1])
        print(f"step {step:4d}  loss {loss:.3f}  held-out greedy accuracy {accuracy:.3f}", flush=True)


def write_model(folder: Path, num_steps: int = STEPS) -> None:
    """Trains the warm start and writes it as a Hugging Face folder with its tokenizer."""
    model = train(num_steps, MODEL_SEED, report_progress)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `arguments`, or else the command line, names."""
    parser = argparse.ArgumentParser(description="Make the arithmetic example's data or its warm-start model.")
    parser.add_argument("what", choices=["data", "model"])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into (default: the example's own)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for training (default: 2)")
    options = parser.parse_args(arguments)
    if options.what == "data":
        write_data(options.out)
    else:
        torch.set_num_threads(options.threads)
        write_model(options.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
