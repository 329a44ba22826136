"""The section `reward`: one mapping or a list, each kind with settings of its own."""

from pathlib import Path

import pytest

from tandem_config.loading import draft_config, dump_resolved, load_config
from tandem_config.sections.reward import FunctionReward, LengthReward, RegexReward

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\n"
TWO = "reward:\n  - {kind: math_verify}\n  - {kind: format, pattern: a, weight: 0.2}\n"
JUDGE = "reward: {kind: judge, model: m, prompt: '{{ completion }}'"
URL = ", url: 'http://h/v1'}"
OWN = "reward: {function: mine.py:score, args: {depth: 3}}\n"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + text, encoding="utf-8")
    return file


# reward of the file, options; key, value, part of the message, part of the suggestion, end of the place.
MISTAKES = [
    ("reward: {kind: regx}", [], "reward.kind", "regx", "must be one of", "did you mean regex?", ":3"),
    ("reward: 5", [], "reward", "5", "must be a section", "write `reward:`", ":3"),
    ("reward: []", [], "reward", "[]", "is an empty list", "exact_match", ":3"),
    ("reward:\n  - 5\n  - {}", [], "reward[0]", "5", "must be a section", "write `reward:`", ":4"),
    ("reward: {kind: regex}", [], "reward.pattern", "", "is missing", "add `pattern:`", ":3"),
    ("reward: {kind: format, pattern: '(a'}", [], "reward.pattern", "(a", "not a regular expr", "single quotes", ":3"),
    ("reward: {pattern: a}", [], "reward.pattern", "a", "reward.kind: exact_match", "kind: regex or format", ":3"),
    ("reward: {timeout_s: 9}", [], "reward.timeout_s", "9", "does nothing", "leave it out", ":3"),
    ("reward: {kind: overlong, require_stop: true}", [], "reward.require_stop", "true", "does nothing", "", ":3"),
    ("reward: {kind: regex, function: f.py:g, pattern: a}", [], "reward.function", "f.py:g", "does nothing",
     "kind: function", ":3"),
    ("reward:\n  - {}\n  - kind: format\n    pattern: a\n    pattern: b", [], "reward[1].pattern", "b",
     "given twice", "keep one", ":7"),
    ("reward:\n  - {kind: math_verify}\n  - kind: format\n    pattern: a\n    find_answer: anchored", [],
     "reward[1].find_answer", "anchored", "reward.kind: format", "math_verify", ":7"),
    ("reward:\n  - {kind: math_verify}\n  - kind: format\n    patern: a\n    pattern: a", [],
     "reward[1].patern", "a", "unknown key", "did you mean reward.pattern?", ":6"),
    ("reward: {reward_fn: a}", [], "reward.reward_fn", "a", "unknown key", "reward.function?", ":3"),
    (TWO, ["reward.weight=2"], "reward.weight", "2", "a list of 2", "reward.0.weight", "reward.weight=2"),
    (TWO, ["reward.2.weight=2"], "reward[2].weight", "2", "has 2 of them", "", "reward.2.weight=2"),
    (TWO, ["reward.0.weight=two"], "reward[0].weight", "two", "must be a number", "", "reward.0.weight=two"),
    (TWO, ["reward[1].timeout_s=-1"], "reward[1].timeout_s", "-1", "greater than 0", "CPU", "reward[1].timeout_s=-1"),
    ("", ["grpo.0.group_size=3"], "grpo.0.group_size", "3", "not a list", "grpo.group_size", "grpo.0.group_size=3"),
    ("reward: {function: mine.py}", [], "reward.function", "mine.py", "FILE.py:NAME", "my_rewards.py:score", ":3"),
    ("reward: {function: a/b:score}", [], "reward.function", "a/b:score", "neither a .py file nor", "e.g.", ":3"),
    ("reward: {function: a.py:f, per: group, batch_size: 4}", [], "reward.batch_size",
     "4", "per: group", "leave", ":3"),
    ("reward: {function: a.py:f, args: {d: 2020-01-01}}", [], "reward.args", "2020-01-01",
     "must be text, a n", "", ":3"),
    ("reward: {kind: length, full_tokens: 4, zero_tokens: 4}", [], "reward.zero_tokens",
     "4", "is full_tokens", "", ":3"),
    ("reward: {name: 'a b'}", [], "reward.name", "a b", "letters, digits", "", ":3"),
    ("reward:\n  - {function: a.py:f}\n  - {function: b.py:f}", [], "reward[1].name",
     "f", "the name of 2", "own", ":5"),
    ("reward:\n  - {accuracy: true}\n  - {kind: overlong, accuracy: true}", [], "reward[1].accuracy", "true",
     "set for 2 rewards", "leave it out", ":5"),
    ("reward: {kind: remote, address: 'http://h:1'}", [], "reward.address", "http://h:1", "no address", "host:port",
     ":3"),
    ("reward: {kind: remote, address: h}", [], "reward.address", "h", "no address", "host:port", ":3"),
    (JUDGE + ", url: 'h/v1'}", [], "reward.url", "h/v1", "is no URL", "http://", ":3"),
    (JUDGE + ", url: 'http://u:p@h/v1'}", [], "reward.url", "", "must not hold credentials", "api_key_env", ":3"),
    (JUDGE + ", url: 'http://h/v1', api_key_env: sk-1}", [], "reward.api_key_env", "", "the key itself", "e.g.", ":3"),
    (JUDGE + ", url: 'http://h/v1', pattern: score}", [], "reward.pattern", "score", "has no group", "parenth", ":3"),
    (JUDGE + ", url: 'http://h/v1', scores: {}}", [], "reward.scores", "{}", "is empty", "yes: 1", ":3"),
    (JUDGE + ", url: 'http://h/v1', scores: {a: 1}, full_score: 5}", [], "reward.full_score", "5", "beside scores",
     "leave", ":3"),
    (JUDGE + ", url: 'http://h/v1', body: {stream: true}}", [], "reward.body", "", "sets stream", "leave", ":3"),
    (JUDGE.replace("n }}", "n }") + URL, [], "reward.prompt", "{{ completion }", "not a Jinja", "",
     ":3"),
    (JUDGE.replace("completion", "answer") + URL, [], "reward.prompt", "{{ answer }}", "does not show", "write",
     ":3"),
    ("reward: {weight: 0}", [], "reward.weight", "0", "nothing to train on", "weight", ":3"),
    ("reward: {kind: overlong, cache_tokens: 300}", [], "reward.cache_tokens", "300",
     "max_new_tokens = 256", "51", ":3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "key", "value", "message", "suggestion", "place"),
    MISTAKES,
    ids=[str(row[:2]) for row in MISTAKES],
)
def test_each_mistake_is_named_with_its_place(
    tmp_path: Path, text: str, options: list[str], key: str, value: str, message: str, suggestion: str, place: str
) -> None:
    (problem,) = draft_config(write(tmp_path, text), options).problems
    assert (problem.key, problem.severity) == (key, "error")
    assert value in problem.value
    assert message in problem.message
    assert suggestion in problem.suggestion
    assert problem.where.endswith(place)


def test_one_reward_may_stand_alone_or_in_a_list(tmp_path: Path) -> None:
    alone = load_config(write(tmp_path, "reward: {kind: regex, pattern: a}")).reward
    assert load_config(write(tmp_path, "reward: [{kind: regex, pattern: a}]")).reward == alone
    (problem,) = draft_config(write(tmp_path, "reward: [{kind: regex}]")).problems
    assert problem.key == "reward.pattern"


def test_names_weights_and_options_of_several(tmp_path: Path) -> None:
    text = "reward:\n  - {kind: math_verify}\n  - {function: a.py:close, weight: 0.5}\n  - {kind: overlong, name: long}"
    config = load_config(write(tmp_path, text), ["reward.1.weight=0.25", "reward[2].cache_tokens=16"])
    assert [(reward.label, reward.weight) for reward in config.reward] == [
        ("math_verify", 1.0),
        ("close", 0.25),
        ("long", 1.0),
    ]


def test_a_function_is_relative_to_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (in_file,) = load_config(write(tmp_path, OWN)).reward
    (by_option,) = load_config(write(tmp_path, OWN), ["reward.function=mine.py:score"]).reward
    (module,) = load_config(write(tmp_path, OWN), ["reward.function=package.mine:score"]).reward
    functions = [reward.function for reward in (in_file, by_option, module) if isinstance(reward, FunctionReward)]
    assert functions == [f"{tmp_path}/mine.py:score", f"{elsewhere}/mine.py:score", "package.mine:score"]


@pytest.mark.parametrize("text", ["", TWO, OWN, JUDGE + URL, "reward: {kind: remote, address: '[::1]:5'}"])
def test_a_resolved_file_loads_to_the_same_rewards(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write(tmp_path, text))
    resolved = tmp_path / "elsewhere" / "config.resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    monkeypatch.chdir(resolved.parent)
    assert load_config(resolved) == config


def test_an_option_can_choose_another_kind_than_a_resolved_file(tmp_path: Path) -> None:
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(dump_resolved(load_config(write(tmp_path, "reward: {kind: math_verify, weight: 2}"))))
    (reward,) = load_config(resolved, ["reward.kind=regex", "reward.pattern=a(b)"]).reward
    assert isinstance(reward, RegexReward)
    assert reward.weight == 2.0
    (problem,) = draft_config(resolved, ["reward.find_answer=anchored", "reward.kind=overlong"]).problems
    assert problem.key == "reward.find_answer"


def test_lengths_of_one_reward(tmp_path: Path) -> None:
    (reward,) = load_config(write(tmp_path, "reward: {kind: length, full_tokens: 9, zero_tokens: 3}")).reward
    assert isinstance(reward, LengthReward)
    assert (reward.full_tokens, reward.zero_tokens, reward.label) == (9, 3, "length")
