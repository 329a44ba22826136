"""Completions of several turns with real environments, tools and chat templates: what is put between the turns."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tokenizers import Tokenizer

from coordinator.environments.conversations import Conversations, Environments
from coordinator.environments.pool import EnvironmentPool
from tandem_clients.flow import Completion, Prompt, Sample
from tandem_clients.sample_stream import OpenGroup
from tandem_clients.trainer import sequences_of
from tandem_clients.transcript import Transcript
from tandem_config.sections.environment import EnvironmentSection
from tests.chats import QWEN, renderer_of, train_tokenizer

pytestmark = pytest.mark.integration

TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b
'''
GUESS = """
import asyncio

class Guess:
    def __init__(self, most=9):
        self.most = most

    async def reset(self, row, seed):
        self.secret = int(row["answer"])
        if row["columns"].get("fails"):
            raise RuntimeError("no game today")
        return [{"role": "user", "content": f"Guess a number up to {self.most}; seed {seed % 7}"}]

    async def step(self, turn):
        if turn.text == "sleep":
            await asyncio.sleep(60)
        if not turn.text.isdigit():
            return [{"role": "user", "content": "a number!"}], -0.25, False
        if int(turn.text) == self.secret:
            return [], 1.0, True
        return [{"role": "user", "content": "no"}], None, False
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([QWEN, CALL, "It is 5. Guess a number up to 9; seed no a number!"])


@asynccontextmanager
async def environments(
    tokenizer: Tokenizer, *, tokens: int = 200, prompt_tokens: int = 200, **settings: Any
) -> AsyncIterator[Environments]:
    section = EnvironmentSection(workers=1, **settings)
    pool = EnvironmentPool(section)
    await pool.start()
    try:
        yield Environments(
            pool=pool,
            section=section,
            renderer=renderer_of(tokenizer, "qwen", tools=pool.tools),
            max_new_tokens=tokens,
            max_prompt_tokens=prompt_tokens,
            seed=3,
        )
    finally:
        await pool.close()


class Policy:
    """A completion that says what it is to say."""

    def __init__(self, tokenizer: Tokenizer, made: Environments, prompt: Prompt) -> None:
        self.tokenizer, self.made = tokenizer, made
        self.group = OpenGroup(group_id="g", prompt=prompt, num_completions=1, takes_turns=True)
        self.talks = Conversations(made)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def says(self, text: str | list[int], *, truncated: bool = False) -> str | None:
        """Returns: the text between this turn and the next one; None: the episode has ended."""
        said = self.ids(text) if isinstance(text, str) else text
        ids = said + self.ids("<|im_end|>") * (not truncated)
        part = Completion(
            token_ids=array("I", ids),
            logprobs=array("f", [-1.0] * len(ids)),
            truncated=truncated,
            oldest_version=4,
            version_spans=((len(ids), 4),),
        )
        self.group.take(1)
        if 0 in self.group.found:
            before = self.group.found[0]
            before.token_ids.extend(ids)
            before.logprobs.extend(part.logprobs)
            assert before.loss_mask is not None
            before.loss_mask.extend([1] * len(ids))
            before.version_spans = ((len(before.token_ids), 4),)
            before.truncated = truncated
        else:
            self.group.found[0] = part
        self.group.running.discard(0)
        self.group.end_turn([0])
        held = self.completion.token_ids.tolist()
        context = await self.talks.answer(self.group, 0)
        assert self.completion.token_ids.tolist() == held, "an answer changes no id that is there"
        self.group.answer(0, context)
        return self.tokenizer.decode(list(context), skip_special_tokens=False) if context else None

    @property
    def completion(self) -> Completion:
        return self.group.found[0]

    @property
    def transcript(self) -> Transcript:
        assert self.completion.transcript is not None
        return self.completion.transcript

    def ended(self) -> tuple[str, Sequence[float | None], bool]:
        assert self.group.is_whole()
        return self.transcript.end, self.transcript.rewards, self.completion.truncated


def counts() -> dict[tuple[str, str], float]:
    """What Prometheus gets of episodes, by name and label."""
    found = {
        (sample.name.removeprefix("tandem_"), "".join(sample.labels.values())): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
    }
    names = ("episodes_total", "episode_failures_total", "episode_turns_", "environment_step_seconds_count")
    return {
        name: value
        for name, value in found.items()
        if name[0].startswith(names) and "_bucket" not in name[0] and not name[0].endswith("_created")
    }


def prompt(**columns: Any) -> Prompt:
    messages = [{"role": "user", "content": "How much?"}]
    return Prompt(row=1, token_ids=array("I", [1]), answer="7", text="How much?", messages=messages, columns=columns)


async def test_a_tool_answers_its_call_and_the_next_turn_follows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    async with environments(tokenizer, tools=[f"{tmp_path}/tools.py:add"]) as made:
        policy = Policy(tokenizer, made, prompt())
        assert await policy.says(CALL) == (
            "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert await policy.says("It is 5.") is None
        assert policy.ended() == ("done", [None, None], False)
        said = policy.transcript
        assert [(message["role"], message.get("content")) for message in said.messages] == [
            ("assistant", None),
            ("tool", "5"),
            ("assistant", "It is 5."),
        ]
        assert said.messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        mask = policy.completion.loss_mask
        assert mask is not None
        turns = [len(policy.ids(text + "<|im_end|>")) for text in (CALL, "It is 5.")]
        between = len(mask) - sum(turns)
        assert [*mask] == [1] * turns[0] + [0] * between + [1] * turns[1]
        assert policy.completion.version_spans[-1][1] == 4
        assert policy.completion.last_turn_ids.tolist() == policy.ids("It is 5.<|im_end|>")
        await policy.talks.close()


async def test_what_an_environment_says_first_is_in_the_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess", args={"most": 5}) as made:
        asked = {"g": prompt(), "h": prompt(fails=True)}
        opened = await made.opened(asked)
        assert opened["h"] == asked["h"], "it is not opened, and fails when its first turn has ended"
        text = tokenizer.decode(opened["g"].token_ids.tolist(), skip_special_tokens=False)
        assert "How much?<|im_end|>\n<|im_start|>user\nGuess a number up to 5" in text
        assert await made.opened(opened) == opened
        before = counts()
        policy = Policy(tokenizer, made, opened["g"])
        assert await policy.says("what?") == "\n<|im_start|>user\na number!<|im_end|>\n<|im_start|>assistant\n"
        assert await policy.says("3") == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
        assert await policy.says("7") is None
        assert policy.ended() == ("done", [-0.25, None, 1.0], False)
        other = Policy(tokenizer, made, opened["h"])
        assert await other.says("7") is None
        assert other.ended()[0] == "failed"
        assert "no game today" in other.transcript.error
        grown = {name: value - before[name] for name, value in counts().items() if value != before[name]}
        assert grown == {
            ("episodes_total", "done"): 1,
            ("episodes_total", "failed"): 1,
            ("episode_failures_total", "error"): 1,
            ("episode_turns_count", ""): 2,
            ("episode_turns_sum", ""): 4,
            ("environment_step_seconds_count", ""): 3,
        }


THOUGHT = "<think>\nmaybe\n</think>\n\n1"
START = "How much?<|im_end|>\n<|im_start|>user\nGuess a number up to 9; seed "


async def test_seeds_differ_by_group_and_are_taken_by_numpy_and_c(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS.replace("; seed {seed % 7}", " {seed}"))
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess") as made:
        seeds = set()
        for number in range(20):
            episode, opening = await made.begin(f"g{number}", prompt(), "e")
            await episode.close()
            seeds.add(int(opening[0]["content"].split()[-1]))
    assert len(seeds) == 20
    assert 2**20 < max(seeds) < 2**31


async def test_thinking_that_the_template_leaves_out_begins_a_branch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Behind a user's message the policy reads what the template writes; each turn stays where it was sampled."""
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess") as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        read = await policy.says("2")
        assert read == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n", "no thinking: nothing is left out"
        read = await policy.says(THOUGHT)
        assert read is not None
        assert START in read
        assert "maybe" not in read
        assert read.endswith("assistant\n1<|im_end|>\n<|im_start|>user\na number!<|im_end|>\n<|im_start|>assistant\n")
        begin = policy.completion.branches
        assert await policy.says("7") is None
        assert policy.ended() == ("done", [None, -0.25, 1.0], False)
        assert policy.completion.branches == begin
        assert len(begin) == 1
        mask = policy.completion.loss_mask
        assert mask is not None
        assert policy.completion.token_ids[begin[0] :].tolist() == [
            *policy.ids(read),
            *policy.ids("7<|im_end|>"),
        ]
        assert mask[begin[0] :].tolist() == [0] * len(policy.ids(read)) + [1] * len(policy.ids("7<|im_end|>"))
        assert [message.get("branch") for message in policy.transcript.messages if message["role"] == "user"] == [
            None,
            True,
        ]


async def test_thinking_is_kept_where_the_section_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess", history="keep") as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        assert START not in (await policy.says(THOUGHT) or START)
        assert policy.completion.branches == ()


TEAM = """
class Team:
    \"\"\"The first turn asks a helper, whose answer is what the second one reads; the fourth follows a summary.\"\"\"

    async def reset(self, row, seed):
        self.talk = row["messages"]
        return []

    async def step(self, turn):
        if turn.index == 0:
            self.talk = [*self.talk, turn.message]
            return {"conversation": [{"role": "user", "content": "You help: " + turn.text}], "done": False}
        if turn.index == 1:
            self.talk = [*self.talk, {"role": "user", "content": "helper: " + turn.text}]
            return {"conversation": self.talk, "done": False}
        if turn.index == 2:
            return {"token_ids": [5, 6, 7], "done": False}
        if turn.index == 3:
            summary = [{"role": "user", "content": "So far: nothing"}, {"role": "assistant", "content": "not sampled"}]
            return {"conversation": [*summary, {"role": "user", "content": "more?"}], "reward": 0.5, "done": False}
        return [], 1.0, True
"""


async def test_an_environment_replaces_the_conversation_and_comes_back_to_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A turn that is part of it keeps its sampled ids, here ones that its text would not be tokenized to."""
    (tmp_path / "env.py").write_text(TEAM)
    async with environments(tokenizer, tokens=300, function=f"{tmp_path}/env.py:Team") as made:
        opened = prompt()
        opened = replace(opened, token_ids=array("I", made.renderer.render([*map(dict, opened.messages or ())])))
        policy = Policy(tokenizer, made, opened)
        odd = [id_ for letter in "number" for id_ in policy.ids(letter)]
        assert odd != policy.ids("number"), "the ids would be those of the text"
        helper = await policy.says(odd)
        assert helper == tokenizer.decode(
            made.renderer.render([{"role": "user", "content": "You help: number"}]), skip_special_tokens=False
        )
        back = await policy.says("It is 5.")
        between = "\n<|im_start|>user\nhelper: It is 5.<|im_end|>\n<|im_start|>assistant\n"
        ids, branches = policy.completion.token_ids, policy.completion.branches
        end = policy.ids("<|im_end|>")
        assert ids[branches[1] :].tolist() == [*opened.token_ids, *odd, *end, *policy.ids(between)]
        assert back == tokenizer.decode(ids[branches[1] :].tolist(), skip_special_tokens=False)
        assert policy.group.held(0)[0] == opened.token_ids, "what the replica gets is as long as the prompt"
        assert policy.group.held(0)[1].tolist() == [*odd, *end, *policy.ids(between)]
        assert await policy.says("x") is not None
        assert policy.completion.token_ids[-3:].tolist() == [5, 6, 7]
        summary = await policy.says("y")
        assert summary is not None
        assert "So far: nothing<|im_end|>\n<|im_start|>assistant\nnot sampled<|im_end|>\n" in summary
        assert await policy.says("z") is None
        assert policy.ended() == ("done", [None, None, None, 0.5, 1.0], False)
        assert len(policy.completion.branches) == 3
        assert [(one["role"], one.get("branch")) for one in policy.transcript.messages] == [
            ("assistant", None),
            ("user", True),
            ("assistant", None),
            ("user", True),
            ("assistant", None),
            ("environment", None),
            ("assistant", None),
            ("user", True),
            ("assistant", None),
        ]
        sampled = sum(policy.completion.loss_mask or ())
        parts = sequences_of(
            Sample(sample_id="g#0", prompt=opened, completion=policy.completion, advantage=1.0, trainable=True)
        )
        assert len(parts) == 4
        assert sum(part.completion.num_sampled for _, part in parts) == sampled, "each turn is trained once"


TALK = """
class Talk:
    async def reset(self, row, seed):
        self.talk = row["messages"]
        return []

    async def step(self, turn):
        said = turn.message["content"] + "".join(call["id"] for call in turn.message["tool_calls"])
        role = {"role": "tool", "name": "add"} if turn.tool_calls else {"role": "user"}
        self.talk += [turn.message, {**role, "content": said}]
        return {"conversation": self.talk, "done": False}
"""


async def test_a_message_has_content_and_calls_even_where_there_are_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """And it is the turn's own one when it comes back in a conversation."""
    (tmp_path / "env.py").write_text(TALK)
    async with environments(tokenizer, tokens=300, function=f"{tmp_path}/env.py:Talk") as made:
        policy = Policy(tokenizer, made, prompt())
        answer = "\n<|im_start|>user\n<tool_response>\ncall00000\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert await policy.says(CALL) == answer
        assert await policy.says("It is 5.") == "\n<|im_start|>user\nIt is 5.<|im_end|>\n<|im_start|>assistant\n"
        assert policy.completion.branches == ()


async def test_ids_without_a_token_fail_the_episode_by_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        TEAM.replace("turn.index == 2", "True")
        .replace("turn.index == 0", "False")
        .replace("turn.index == 1", "False")
        .replace("[5, 6, 7]", "[5, 100_000]")
    )
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Team") as made:
        policy = Policy(tokenizer, made, prompt())
        assert await policy.says("hi") is None
        assert policy.transcript.end == "failed"
        assert "step returned the token id 100000, for which the tokenizer has no token" in policy.transcript.error


async def test_a_branch_that_is_too_long_ends_the_episode(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(TEAM.replace('"You help: "', '"You help: " + "do it " * 40'))
    async with environments(tokenizer, tokens=30, function=f"{tmp_path}/env.py:Team") as made:
        policy = Policy(tokenizer, made, prompt())
        assert await policy.says("hi") is None
        assert policy.ended() == ("max_tokens", [None], True)
        assert policy.completion.branches == ()


@pytest.mark.parametrize(
    ("settings", "tokens", "said", "end"),
    [
        ({"max_turns": 2}, 400, ["1", "2"], "max_turns"),
        ({}, 12, ["1"], "max_tokens"),
        ({"episode_timeout_s": 1.0}, 400, ["1", "sleep"], "timeout"),
    ],
)
async def test_an_episode_that_is_cut_off_is_truncated(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, Any], tokens: int, said: list[str], end: str
) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, tokens=tokens, function=f"{tmp_path}/env.py:Guess", **settings) as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        *others, last = said
        assert None not in [await policy.says(text) for text in others]
        assert await policy.says(last) is None
        assert (policy.ended()[0], policy.ended()[2]) == (end, True)


async def test_rewards_of_turns_that_add_up_to_infinity_fail_the_episode(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS.replace("-0.25", "-1e308"))
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess") as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        assert await policy.says("what") is not None
        assert await policy.says("what") is None
        assert policy.transcript.end == "failed"
        assert policy.transcript.error.endswith("the rewards of its turns add up to -inf")


async def test_the_wait_for_other_episodes_of_a_worker_takes_no_time_of_an_episode(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Eight steps of 0.5 s, one after the other: a worker does one at a time if no method is `async def`."""
    slow = GUESS.replace("async def", "def").replace("await asyncio.sleep(60)", "__import__('time').sleep(0.5)")
    (tmp_path / "env.py").write_text(slow)
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess", episode_timeout_s=2.5) as made:
        opened = (await made.opened({"g": prompt()}))["g"]

        async def play() -> str:
            policy = Policy(tokenizer, made, opened)
            assert await policy.says("sleep") is not None
            assert await policy.says("7") is None
            return str(policy.ended()[0])

        assert await asyncio.gather(*(play() for _ in range(8))) == ["done"] * 8


async def test_a_turn_that_the_limit_cuts_off_is_answered_and_is_the_last(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess") as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        assert await policy.says("what", truncated=True) is None
        assert policy.ended() == ("max_tokens", [-0.25], True)


async def test_a_prompt_that_becomes_too_long_is_not_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    async with environments(tokenizer, prompt_tokens=5, function=f"{tmp_path}/env.py:Guess") as made:
        policy = Policy(tokenizer, made, (await made.opened({"g": prompt()}))["g"])
        assert await policy.says("7") is None
        assert "or these are too many tokens" in policy.transcript.error


async def test_episodes_that_are_left_are_closed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        GUESS + f"\n    async def close(self): open({str(tmp_path / 'closed')!r}, 'a').write('x')"
    )
    async with environments(tokenizer, function=f"{tmp_path}/env.py:Guess") as made:
        opened = (await made.opened({"g": prompt()}))["g"]
        policies = [Policy(tokenizer, made, opened) for _ in range(3)]
        before = REGISTRY.get_sample_value("tandem_episodes_open") or 0.0
        await asyncio.gather(*(policy.says("1") for policy in policies))
        assert REGISTRY.get_sample_value("tandem_episodes_open") == before + 3
        for policy in policies:
            await policy.talks.close()
        assert REGISTRY.get_sample_value("tandem_episodes_open") == before
    assert (tmp_path / "closed").read_text() == "x" * 4  # that of the prompt too
