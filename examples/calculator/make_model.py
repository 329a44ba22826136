"""Makes what the example starts from: the data files, and a tiny Qwen3 that uses its calculator sloppily.

    python -m examples.calculator.make_model data        writes train.jsonl and heldout.jsonl (the same bytes anywhere)
    python -m examples.calculator.make_model model       trains the warm start and writes model/ (three minutes)

As in examples/arithmetic, both are committed.
"""

import argparse
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema

from examples.arithmetic.make_model import IGNORED_LABEL, learning_rate
from examples.calculator.problems import Question, draw_question, sloppy_messages, split_questions, write_data
from examples.calculator.tools import calculate
from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import ChatTemplate
from tandem_files.tokenizer import TextCodec

HERE = Path(__file__).resolve().parent
# Written by hand; saved with the tokenizer again.
CHAT_TEMPLATE = HERE / "model" / "chat_template.jinja"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
PAD_ID, EOS_ID = 0, 2
# Texts that are one token each, so that an episode has few: about 70 tokens, of which the policy writes 24.
PIECES = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "system", "user", "assistant"),
    *("Tools: ", "What is ", " + ", " - ", " * "),
    *('{"name": "', "calculate", '", "arguments": {"', "expression", '": "', '"}}'),
)
CHARACTERS = "\n 0123456789+-*/=().,:;?!'\"{}[]<>_abcdefghijklmnopqrstuvwxyz"
VOCAB_SIZE = 96  # a little more than the tokenizer has, as in most published models
MAX_TURNS, MAX_TURN_TOKENS = 3, 24

# An assistant's turn, with the token that ends it.
_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", flags=re.DOTALL)

MODEL_SEED = 0
STEPS = 450
BATCH_SIZE = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token per piece, or else per character, and the chat template."""
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *PIECES, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    pieces = "|".join(re.escape(piece) for piece in PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pieces}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, start, eos, unk = SPECIAL_TOKENS
    tokenizer.add_special_tokens([AddedToken(start, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unk, model_max_length=256,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )  # fmt: skip


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Returns a freshly initialised Qwen3 of 603,520 float32 parameters, embeddings tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def build_renderer() -> TemplateRenderer:
    """Returns what Tandem itself writes and reads conversations with."""
    codec = TextCodec(build_tokenizer().backend_tokenizer, (EOS_ID,))
    template = ChatTemplate(CHAT_TEMPLATE.read_text(encoding="utf-8"), {}, {})
    return TemplateRenderer(template, codec, [get_json_schema(calculate)])


def demonstrations(
    questions: Sequence[Question], rng: random.Random, renderer: TemplateRenderer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [B, T] token ids of sloppy conversations, padded on the right, and labels: the assistant's turns."""
    rows, labels = [], []
    for question in questions:
        messages = sloppy_messages(question, rng)
        text = renderer.template.render(messages, renderer.tools, add_generation_prompt=False)
        parts = renderer.codec.encode_rendered(_TURN.split(text))
        rows.append(torch.tensor([id_ for part in parts for id_ in part]))
        said = [id_ if place % 2 else IGNORED_LABEL for place, part in enumerate(parts) for id_ in part]
        labels.append(torch.tensor(said))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, PAD_ID), pad(labels, True, IGNORED_LABEL)


def train(num_steps: int, seed: int, report: Callable[[int, float, Qwen3ForCausalLM], None]) -> Qwen3ForCausalLM:
    """Imitates the sloppy demonstrator on questions that are drawn anew, none of them held out.

    Args:
        num_steps: optimizer steps, > 0.
        seed: of the initialisation, the questions and the demonstrator.
        report: called after each step with the step, its loss (nats per token) and the model.
    """
    rng, renderer, model = random.Random(f"demonstrations {seed}"), build_renderer(), build_model(seed)
    heldout = set(split_questions()[1])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        drawn = [draw_question(rng) for _ in range(BATCH_SIZE)]
        ids, labels = demonstrations([question for question in drawn if question not in heldout], rng, renderer)
        loss = model.train()(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.item(), model)
    return model


def accuracy(model: Qwen3ForCausalLM, questions: Sequence[Question], *, sampled: bool = False) -> float:
    """Returns the share (0..1) of questions whose episode ends with exactly the answer.

    Args:
        sampled: at temperature 1; otherwise greedily.
    """
    renderer = build_renderer()
    held = {place: renderer.render([{"role": "user", "content": each.prompt}]) for place, each in enumerate(questions)}
    num_right = 0
    for _ in range(MAX_TURNS):
        said = dict(zip(held, _sampled(model, list(held.values()), sampled), strict=True)) if held else {}
        for place, ids in said.items():
            turn = renderer.parse(ids)
            if turn.tool_calls:
                answers = [{"role": "tool", "content": _result(call.arguments)} for call in turn.tool_calls]
                held[place] += [*ids, *renderer.bridge(ids, turn, answers)]
            else:
                num_right += turn.content == questions[place].answer
                del held[place]
    return num_right / len(questions)


def _result(arguments: Mapping[str, Any]) -> str:
    expression = arguments.get("expression")
    return calculate(expression) if isinstance(expression, str) else "error"


def _sampled(model: Qwen3ForCausalLM, prompts: Sequence[list[int]], sampled: bool) -> list[list[int]]:
    """Returns what the model writes after each prompt, up to the token that ends a turn."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts])
    options: dict[str, Any] = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    mask = (ids != PAD_ID).int()
    out: Any = model.eval().generate(ids, attention_mask=mask, max_new_tokens=MAX_TURN_TOKENS, **options)
    return [[id_ for id_ in row if id_ != PAD_ID] for row in out[:, longest:].tolist()]


def report_progress(step: int, loss: float, model: Qwen3ForCausalLM) -> None:
    """Prints loss and held-out accuracy every 100 steps."""
    if step % 100 == 0:
        questions = split_questions()[1]
        found = [f"{accuracy(model, questions, sampled=sampled):.3f}" for sampled in (False, True)]
        print(f"step {step:4d}  loss {loss:.3f}  held-out accuracy greedy {found[0]}, sampled {found[1]}", flush=True)


def write_model(folder: Path, num_steps: int = STEPS) -> None:
    """Trains the warm start and writes it as a Hugging Face folder with its tokenizer."""
    model = train(num_steps, MODEL_SEED, report_progress)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `arguments`, or else the command line, names."""
    parser = argparse.ArgumentParser(description="Make the calculator example's data or its warm-start model.")
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
