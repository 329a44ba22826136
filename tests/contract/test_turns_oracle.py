"""Turns have the ids of an independent renderer: PyPI's `renderers`, in the environment of `make check-turns`."""

import json
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem_files.chat.renderer import FollowUp, TemplateRenderer, probe
from tests.chats import BOS, PATTERNS, STOPS, odd_ids, renderer_of, train_tokenizer

REPO = Path(__file__).parents[2]
ORACLE = REPO / ".cache/oracle-venv"
CONVERSATIONS = 1000
ORACLE_S = 600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ORACLE / "installed.txt").exists(), reason="no oracle: `make check-turns` installs requirements/oracle.txt"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template of TRL's wheel, and the oracle's renderer for it.

    Attributes:
        manner: of its marks, as in tests/chats.py.
        oracle: the oracle's class; its bridge at least.
        is_default: whether the oracle renders it with transformers, as it has no renderer of its own for it.
        arguments: of the template.
        thinks: whether turns may have thinking.
        opened: whether prompts open it, but DeepSeek's behind tool results.
    """

    template: str
    manner: str
    oracle: str
    is_default: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False
    opened: bool = False


FAMILIES = {
    "qwen2.5": Family(template="qwen2_5", manner="qwen", oracle="Qwen3", is_default=True),
    "qwen3, thinking": Family(template="qwen3", manner="qwen", oracle="Qwen3", thinks=True),
    "qwen3, no thinking": Family(template="qwen3", manner="qwen", oracle="Qwen3", arguments={"enable_thinking": False}),
    "qwen3-moe": Family(template="qwen3", manner="qwen", oracle="Qwen3", thinks=True),
    "qwen3-instruct-2507": Family(template="qwen3_instruct_2507", manner="qwen", oracle="Qwen3", is_default=True),
    "llama 3.2": Family(template="llama3_2", manner="llama", oracle="Llama3", arguments={"date_string": "26 Jul 2024"}),
    "glm-4.5": Family(template="glm4moe", manner="glm", oracle="GLM45", thinks=True),
    "qwen3.5": Family(template="qwen3_5_think", manner="qwen_xml", oracle="Qwen35", thinks=True, opened=True),
    "qwen3.5, no thinking": Family(
        template="qwen3_5_think", manner="qwen_xml", oracle="Qwen35", arguments={"enable_thinking": False}
    ),
    "deepseek-v3": Family(template="deepseekv3", manner="deepseek", oracle="DeepSeekR1", thinks=True, opened=True),
}
# What differs behind a turn, as text. The template writes a newline between tool results, ends them only where no
# question follows, and opens no thinking behind them.
BRIDGED = {
    "deepseek-v3": r"(?<=<｜tool▁output▁end｜>)(?:\n(?=<｜tool▁output▁begin｜>)|<｜tool▁outputs▁end｜>(?:<think>\n)?)",
}
# What differs in the oracle's own rendering of earlier turns, where it departs from the template: as text, nothing but
# what such a pattern finds. Qwen3 with thinking: not the text, but the tokens of a newline that an answer begins with.
DEPARTURES = {
    "qwen3, thinking": "(?!)",
    "qwen3-moe": "(?!)",
    # renderers/qwen3.py says so: turns keep the empty block that the prompt had.
    "qwen3, no thinking": r"(?<=assistant\n)(?:<think>\n\n</think>\n\n)?\n*",
    # The template writes a newline between calls.
    "glm-4.5": r"(?<=</tool_call>)\n(?=<tool_call>)",
    # The oracle keeps thinking, and the empty block, before the last question.
    "qwen3.5": r"(?<=assistant\n)<think>\n[^<]*\n</think>\n\n",
    "qwen3.5, no thinking": r"(?<=assistant\n)<think>\n\n</think>\n\n",
    # And a newline between calls, as GLM's.
    "deepseek-v3": rf"{BRIDGED['deepseek-v3']}|(?<=<｜tool▁call▁end｜>)\n(?=<｜tool▁call▁begin｜>)",
}
MANY = {"qwen3, no thinking", "qwen3.5", "qwen3.5, no thinking", "deepseek-v3"}
WORDS = [
    *("The answer", " is", " 5", ".", "\n", "\n\n", " ", "  ", "\t", "12345", "é", "\N{GRINNING FACE}", '{"a": 1}'),
    *(
        "don't",
        "x = [1, 2]\n",
        "北京",
        "\u200d",
        "```py\n",
        "<b>",
        "|",
        "</",
        "nonsense",
        ", and",
        "?",
        "\r\n",
        "\\n",
        "'",
    ),
]
VALUES: list[Any] = [0, -1, 2.5, True, None, "", "text", ' "quoted" \n', "é", [1, "two"], {"deep": {"er": []}}, "5"]


class Talk:
    """Draws messages, tools, and what a policy samples."""

    def __init__(self, family: Family, tokenizer: Tokenizer, seed: str) -> None:
        self.family, self.tokenizer, self.draw = family, tokenizer, random.Random(seed)
        self.num_tools = 0

    def text(self) -> str:
        return "".join(self.draw.choices(WORDS, k=self.draw.randrange(1, 12)))

    def tools(self) -> list[dict[str, Any]]:
        self.num_tools = self.draw.randrange(1, 4)
        kinds = ("string", "integer", "object", "array", "number")
        return [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{place}",
                    "description": self.text(),
                    "parameters": {
                        "type": "object",
                        "properties": {key: {"type": self.draw.choice(kinds)} for key in "ab"},
                        "required": ["a"],
                    },
                },
            }
            for place in range(self.num_tools)
        ]

    def opening(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.text()}] if self.draw.random() < 0.5 else []
        return [*system, {"role": "user", "content": self.text()}]

    def follow(self, num_calls: int) -> list[dict[str, Any]]:
        """Results of the calls; else, and at times behind them, a user's message."""
        results = [{"role": "tool", "tool_call_id": f"c{n}", "content": self.text()} for n in range(num_calls)]
        asked = [] if results and self.draw.random() < 0.8 else [{"role": "user", "content": self.text()}]
        return [*results, *asked]

    def history(self) -> list[dict[str, Any]]:
        """A conversation of several turns with calls, as a client sends one."""
        messages = self.opening()
        # DeepSeek's template has no mark before the calls of a second turn, which the oracle writes.
        for _ in range(self.draw.randrange(2 if self.family.manner == "deepseek" else 4)):
            turn: dict[str, Any] = {"role": "assistant", "content": self.text()}
            calls = [self.call() for _ in range(self.num_calls())]
            if self.family.thinks and self.draw.random() < 0.5:
                turn["reasoning_content"] = self.text().strip() or "so"
            if calls:
                turn["content"] = "" if self.draw.random() < 0.5 else turn["content"]
                turn["tool_calls"] = [
                    {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": self.given(arguments)}}
                    for n, (name, arguments) in enumerate(calls)
                ]
            messages += [turn, *self.follow(len(calls))]
        return messages

    def given(self, arguments: dict[str, Any]) -> Any:
        """Arguments as the template takes them."""
        return json.dumps(arguments) if self.family.manner == "deepseek" else arguments

    def num_calls(self) -> int:
        most = 1 if self.family.manner == "llama" else 3
        return self.draw.randrange(1, most + 1) if self.draw.random() < 0.5 else 0

    def call(self) -> tuple[str, dict[str, Any]]:
        return f"tool_{self.draw.randrange(self.num_tools)}", {
            key: self.draw.choice(VALUES) for key in "ab"[: self.draw.randrange(3)]
        }

    def sampled(self, opened: bool = True) -> tuple[list[int], int]:
        """What a policy samples in a turn, not always as the tokenizer would. Returns: ids, number of calls.

        Args:
            opened: whether the prompt opens thinking, if the family's do.
        """
        num_calls, manner = self.num_calls(), self.family.manner
        text = "" if num_calls else self.text()
        if num_calls and manner != "llama" and self.draw.random() < 0.5:
            text = f"{self.text()}\n"
        calls = "\n".join(self.written(*self.call()) for _ in range(num_calls))
        text += calls if manner != "deepseek" or not calls else f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
        if self.family.opened and opened:
            text = f"{self.text()}\n</think>\n\n{text}"
        elif manner == "glm":
            text = f"\n<think>{'Easy.' * self.draw.randrange(2)}</think>\n{text}"
        elif self.family.thinks and self.draw.random() < 0.6:
            text = f"<think>\n{self.text()}\n</think>\n\n{text}"
        if self.draw.random() < 0.5:
            ids = odd_ids(self.tokenizer, text, self.draw)
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        ends = STOPS[manner] if manner != "glm" else ["<|observation|>" if num_calls else "<|user|>"]
        end = self.tokenizer.token_to_id(self.draw.choice(ends))
        return [*ids, *([] if end is None else [end])], num_calls

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the template's model writes it, with spaces of its own."""
        separators = self.draw.choice([(", ", ": "), (",", ":"), (" ,", ":  ")])
        text = json.dumps(arguments, ensure_ascii=self.draw.random() < 0.5, separators=separators)
        if self.family.manner == "llama":
            return f'{{"name": "{name}", "parameters": {text}}}'
        if self.family.manner == "glm":
            shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in shown.items()]
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
        if self.family.manner == "qwen_xml":
            shown = {
                key: json.dumps(value) if isinstance(value, dict | list) else str(value)
                for key, value in arguments.items()
            }
            pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items()]
            return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"
        if self.family.manner == "deepseek":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


@cache
def tokenizer_of(manner: str) -> Tokenizer:
    texts = [path.read_text(encoding="utf-8") for path in sorted((REPO / "docs").glob("*.md"))]
    return train_tokenizer(texts, pattern=PATTERNS["qwen" if manner.startswith("qwen") else "llama"], vocabulary=6000)


def template_of(family: Family) -> str:
    (file,) = ORACLE.glob(f"lib/python*/site-packages/trl/chat_templates/{family.template}.jinja")
    return file.read_text(encoding="utf-8")


def ask(folder: Path, family: Family, tokenizer: Tokenizer, cases: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Let the oracle answer the cases."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": BOS.get(family.manner, "<|begin_of_text|>"), "eos_token": STOPS[family.manner][0]}
    settings = {"template": template_of(family), "oracle": family.oracle, "is_default": family.is_default,
                "arguments": dict(family.arguments), "special_tokens": tokens}  # fmt: skip
    (folder / "oracle.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    command = [str(ORACLE / "bin/python"), "-m", "tests.contract.turns_oracle", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=ORACLE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_the_oracle(tmp_path: Path, name: str) -> None:
    """And those of transformers, also where the oracle departs from the template on purpose."""
    family = FAMILIES[name]
    tokenizer, template = tokenizer_of(family.manner), template_of(family)
    talk = Talk(family, tokenizer, name)
    ours: list[list[int]] = []
    cases: list[dict[str, Any]] = []
    for _ in range(CONVERSATIONS):
        tools, messages = talk.tools(), talk.history()
        renderer = renderer_of(tokenizer, family.manner, template, tools=tools, **family.arguments)
        ours.append(renderer.render(messages))
        cases.append({"messages": messages, "tools": tools})
    answers = ask(tmp_path, family, tokenizer, cases)
    assert ours == [answer["template"] for answer in answers]
    departs = [(found, answer["rendered"]) for found, answer in zip(ours, answers, strict=True)]
    departs = [pair for pair in departs if pair[0] != pair[1]]
    assert len(departs) < CONVERSATIONS * (0.9 if name in MANY else 0.35)
    for pair in departs:
        texts = tokenizer.decode_batch(pair, skip_special_tokens=False)
        assert len({re.sub(DEPARTURES[name], "", text) for text in texts}) == 1


def stripped(call: list[Any]) -> list[Any]:
    return [call[0], {key: value.strip() if isinstance(value, str) else value for key, value in call[1].items()}]


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_those_of_the_oracle(tmp_path: Path, name: str) -> None:
    """Held and sampled ids and what is put behind them, over conversations of one to four turns."""
    family = FAMILIES[name]
    tokenizer, template = tokenizer_of(family.manner), template_of(family)
    talk = Talk(family, tokenizer, f"{name} turns")
    ours: list[tuple[list[int], list[Any]]] = []
    cases: list[dict[str, Any]] = []
    for _ in range(CONVERSATIONS):
        tools, messages = talk.tools(), talk.opening()
        renderer = renderer_of(tokenizer, family.manner, template, tools=tools, **family.arguments)
        held, behind = renderer.render(messages), None
        for _ in range(talk.draw.randrange(1, 5)):
            is_open = as_text(renderer, held[-8:]).endswith("<think>\n")
            sampled, num_calls = talk.sampled(is_open)
            turn = renderer.parse(sampled, behind)
            assert not turn.truncated
            follow = talk.follow(num_calls)
            cases.append({"messages": messages, "tools": tools, "held": held, "sampled": sampled, "follow": follow})
            behind = renderer.bridge(sampled, turn, follow)
            held = [*held, *sampled, *behind]
            ours.append((held, [[call.name, call.arguments] for call in turn.tool_calls]))
            assert len(turn.tool_calls) == num_calls, (turn.raw, turn.errors)
    compared = 0
    for case, (held, calls), answer in zip(cases, ours, ask(tmp_path, family, tokenizer, cases), strict=True):
        prefix = [*case["held"], *case["sampled"]]
        assert held[: len(prefix)] == prefix
        if name in BRIDGED:
            texts = [as_text(renderer, ids[len(prefix) :]) for ids in (held, answer["bridged"])]
            assert len({re.sub(BRIDGED[name], "", text) for text in texts}) == 1
        else:
            assert held == answer["bridged"]
        # None: the value is not of the type that the tool's schema says, which the oracle checks.
        pairs = list(zip(calls, answer["calls"], strict=True))
        differing = [(call, other) for call, other in pairs if other is not None and call != other]
        if family.manner in (
            "glm",
            "qwen_xml",
        ):  # the oracle strips values that are text; the template writes them as they are
            differing = [pair for pair in differing if stripped(pair[0]) != stripped(pair[1])]
        assert differing == []
        compared += sum(other is not None for _, other in pairs)
    assert compared > CONVERSATIONS / 2


def as_text(renderer: TemplateRenderer, ids: Sequence[int]) -> str:
    return renderer.codec.decode_all([ids])[0]


@pytest.mark.parametrize(
    ("name", "cut", "ours", "theirs"),
    [
        ("qwen2.5", "It is", "<|im_end|>\n<|im_start|>user", "<|im_end|>\n<|im_start|>user"),
        ("llama 3.2", "It is", "<|eot_id|><|start_header_id|>user", "<|eot_id|><|start_header_id|>user"),
        ("qwen3, thinking", "<think>\nSo", "\n</think>\n\n<|im_end|>\n", "</think><|im_end|>\n"),
        ("glm-4.5", "\n<think></think>\nIt is", "<|user|>\n", "<|endoftext|><|user|>\n"),
    ],
)
def test_turns_that_are_cut_off_end_as_the_template_ends_them(
    tmp_path: Path, name: str, cut: str, ours: str, theirs: str
) -> None:
    """Where the oracle ends them otherwise, the template's own rendering of the turn decides."""
    family = FAMILIES[name]
    tokenizer, template = tokenizer_of(family.manner), template_of(family)
    renderer = renderer_of(tokenizer, family.manner, template, **family.arguments)
    question, follow = {"role": "user", "content": "What is 2+3?"}, [{"role": "user", "content": "Go"}]
    held = renderer.render([question])
    sampled = renderer.codec.encode_rendered([cut])[0]
    turn = renderer.parse(sampled)
    assert turn.truncated
    case = {"messages": [question], "tools": None, "held": held, "sampled": sampled, "follow": follow}
    (answer,) = ask(tmp_path, family, tokenizer, [case])
    behind = as_text(renderer, renderer.bridge(sampled, turn, follow))
    their_behind = as_text(renderer, answer["bridged"][len(held) + len(sampled) :])
    assert behind.startswith(ours)
    assert their_behind.startswith(theirs)
    assert their_behind.removeprefix(theirs) == behind.removeprefix(ours)
    # As the template writes the turn while it is the last, and GLM's before another.
    later = [] if family.thinks and turn.reasoning else follow
    whole = renderer.template.render([question, turn.message(renderer.thought_key), *later], renderer.tools)
    assert cut + ours in whole
    assert (cut + theirs in whole) == (ours == theirs)


PAGE_KINDS = [
    "tool results after a call",
    "a question after an answer",
    "a question after an answer between spaces",
    "tool results after thinking and a call",
    "a question after thinking and an answer",
]
# Templates of the page's table, by their names in it.
PAGE = {
    **{name: family for name, family in FAMILIES.items() if name != "qwen3-moe"},
    "qwen3, TRL's for training": Family(template="qwen3_training", manner="qwen", oracle=""),
    "glm-4.5, no thinking": Family(template="glm4moe", manner="glm", oracle="", arguments={"enable_thinking": False}),
    "gpt-oss": Family(template="gptoss", manner="harmony", oracle=""),
    "deepseek-r1-distill": Family(template="deepseek_r1_distill", manner="deepseek", oracle=""),
    "llama 3": Family(template="llama3", manner="llama", oracle=""),
}


def verdict(follow: FollowUp | None) -> str:
    if follow is None:
        return "-"
    if follow.refused:
        return "not read" if "does not read" in follow.refused else "not written"
    return "same" if follow.append_only else f"{follow.held!r}: {follow.rendered!r}".replace("|", "\\|")


@pytest.mark.parametrize("name", PAGE)
def test_the_page_has_the_verdict_on_each_template(name: str) -> None:
    family = PAGE[name]
    template = template_of(family)
    renderer = renderer_of(train_tokenizer([template]), family.manner, template, **family.arguments)
    found = {follow.kind: follow for follow in probe(renderer)}
    assert set(found) <= set(PAGE_KINDS)
    cells = [name, renderer.parser, *(verdict(found.get(kind)) for kind in PAGE_KINDS)]
    assert f"| {' | '.join(cells)} |" in (REPO / "docs/turns.md").read_text(encoding="utf-8")
