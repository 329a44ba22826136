import decimal
import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from coordinator.data import scan
from coordinator.data.prompts import load_prompts
from servicekit.errors import ConfigError
from tandem_config.schema import DataSection
from tandem_files.rows.problems import DataError
from tandem_files.tokenizer import TextCodec, stop_token_ids
from tests.kit.folders import EOS, encode, write_data, write_small_model


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_folders(write_small_model(tmp_path / "model"))


def section(train: object, **settings: object) -> DataSection:
    return DataSection.model_validate({"train": train, **settings})


def test_prompts_are_tokenized(tmp_path: Path, codec: TextCodec) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "10+20=", "answer": 30, "level": {"n": 1}}\n\n{"prompt": "7+5=", "answer": "12"}\n')
    loaded = load_prompts(section(path), "train", codec)
    assert [(p.row, list(p.token_ids), p.answer, p.text, p.name, p.source) for p in loaded] == [
        (1, encode("10+20="), "30", "10+20=", "row1", "a"),
        (3, encode("7+5="), "12", "7+5=", "row3", "a"),
    ]
    assert loaded.sources[0][0].columns == {"prompt": "10+20=", "answer": 30, "level": {"n": 1}}
    assert loaded.dropped == {}


def test_overlong_prompts_by_policy(tmp_path: Path, codec: TextCodec) -> None:
    path = write_data(tmp_path / "a.jsonl", [(10, 20), (7, 5), (11, 12)])
    with pytest.raises(DataError) as caught:
        load_prompts(section(path, max_prompt_tokens=5), "train", codec)
    (problem,) = caught.value.problems
    assert (problem.number, problem.others) == (1, (3,))
    assert "has 6 tokens, more than data.max_prompt_tokens = 5: raise it to 6" in str(caught.value)
    dropped = load_prompts(section(path, max_prompt_tokens=5, overlong_prompts="drop"), "train", codec)
    assert ([prompt.row for prompt in dropped], dropped.dropped) == ([2], {"a": 2})
    with pytest.raises(DataError, match="every prompt is longer"):
        load_prompts(section(path, max_prompt_tokens=2, overlong_prompts="drop"), "train", codec)


def test_bad_rows_stop_the_load(tmp_path: Path, codec: TextCodec) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: has no 'answer'"):
        load_prompts(section(path), "train", codec)


def test_rows_of_many_batches_and_of_large_ones_are_all_there(
    tmp_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_BATCH_ROWS", 4)
    monkeypatch.setattr(scan, "_BATCH_BYTES", 100)
    path = write_data(tmp_path / "a.jsonl", [(n, n) for n in range(30)])
    assert [prompt.answer for prompt in load_prompts(section(path), "train", codec)] == [str(2 * n) for n in range(30)]


def test_files_of_a_list_are_one_source_with_names_of_their_own(tmp_path: Path, codec: TextCodec) -> None:
    write_data(tmp_path / "a.jsonl", [(1, 1), (2, 2)])
    (tmp_path / "b").mkdir()
    for name in ("a.jsonl", "c d.jsonl"):
        (tmp_path / "b" / name).write_text('{"q": "3+3=", "answer": "6"}\n')
    train = [tmp_path / "a.jsonl", {"path": tmp_path / "b" / "*.jsonl", "prompt_key": "q", "name": "B"}]
    loaded = load_prompts(section(train), "train", codec)
    assert len(loaded.sources) == 1
    assert [(p.name, p.source) for p in loaded] == [
        ("a.row1", "a"),
        ("a.row2", "a"),
        ("a-2.row1", "B"),
        ("c-d.row1", "B"),
    ]


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path, codec: TextCodec) -> None:
    path = write_data(tmp_path / "a.jsonl", [(1, 1)])
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"link\.jsonl: is named twice, also as .*/a\.jsonl: "):
        load_prompts(section([path, tmp_path / "l*.jsonl"]), "train", codec)


def test_a_parquet_file_is_as_its_rows_in_json(tmp_path: Path, codec: TextCodec) -> None:
    columns = {"prompt": ["1+1=", "2+2="], "answer": [2, 4], "price": [decimal.Decimal("1.5"), None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "1+1=", "answer": 2, "price": "1.5"}\n{"prompt": "2+2=", "answer": 4, "price": null}\n'
    )
    one, other = (
        list(load_prompts(section(tmp_path / name), "train", codec, tmp_path)) for name in ("a.parquet", "a.jsonl")
    )
    assert [replace(prompt, file="") for prompt in one] == [replace(prompt, file="") for prompt in other]
    assert [prompt.file for prompt in one] == [str(tmp_path / "a.parquet")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.parquet", "model"]


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path, codec: TextCodec) -> None:
    path = write_data(tmp_path / "a.jsonl", [(n, 10) for n in range(10, 30)])
    path.write_text(path.read_text().rstrip())
    source = load_prompts(section(path), "train", codec).sources[0]
    with path.open("a") as file:
        file.write('\n{"prompt": "more", "answer": "rows"}\n')
    assert source[19].answer == "39"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))  # lines of equal length
    with pytest.raises(ConfigError, match=r"a\.jsonl:20 is no longer what and where it was when the run began"):
        source[19]
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl can no longer be read: No such file"):
        source[19]


def test_decoding_leaves_special_tokens_out(codec: TextCodec) -> None:
    assert codec.decode([[*encode("95"), EOS], encode("1")]) == ["95", "1"]
    assert codec.stop_token_ids == (EOS,)


def test_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert stop_token_ids(tmp_path) == (3, 7, 9)
    assert stop_token_ids(tmp_path, 5) == (3, 5, 7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="completions never end"):
        stop_token_ids(tmp_path)
    assert stop_token_ids(tmp_path, 5) == (5,)


@pytest.mark.parametrize("eos", ['"="', '{"content": "=", "lstrip": false}'])
def test_the_tokenizers_end_of_sequence_stops_too(tmp_path: Path, eos: str) -> None:
    model = write_small_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(f'{{"eos_token": {eos}}}')
    assert TextCodec.from_folders(model).stop_token_ids == (EOS, *encode("="))


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    (model / "config.json").write_text('{"vocab_size": 10, "eos_token_id": 1}')
    with pytest.raises(ValueError, match=r"token '=' has id 14, but .*config.json has vocab_size 10"):
        TextCodec.from_folders(model)


def test_tokenizer_files_that_cannot_be_used(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"set model.tokenizer_path"):
        TextCodec.from_folders(model, tmp_path)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        TextCodec.from_folders(model)


def llama_like(front: str = "<s> $A") -> TextCodec:
    """A tokenizer that puts BOS in front, as Llama 3's does."""
    words = ["<s>", "</s>", "<|user|>", "hello", "there", "<unk>"]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.post_processor = TemplateProcessing(single=front, special_tokens=[("<s>", 0), ("</s>", 1)])
    return TextCodec(tokenizer, (1,))


def test_a_prompt_that_begins_with_bos_gets_no_second_one() -> None:
    texts = ["hello there", "<s>hello there", "<s><|user|>hello", "", "<s>", "<|user|>hello"]
    assert llama_like().encode(texts) == [[0, 3, 4], [0, 3, 4], [0, 2, 3], [0], [0], [0, 2, 3]]
    assert llama_like("<s> $A </s>").encode(["<s>hello", "hello"]) == [[0, 3, 1], [0, 3, 1]]
    assert llama_like("$A").encode(["<s>hello", "<s><s>hello"]) == [[0, 3], [0, 0, 3]]


CHAT = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
ASKING = "{% for m in messages %}{% if m['content'] is none %}calls{% else %}{{ m.content }}{% endif %}{% endfor %}"


def texts(path: Path, codec: TextCodec, **settings: object) -> list[str]:
    section_ = section(path, answer_key=None, chat_template=settings.pop("chat_template", CHAT), **settings)
    return [prompt.text for prompt in load_prompts(section_, "train", codec)]


def rows_of(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_has_a_system_prompt_of_its_own(tmp_path: Path, codec: TextCodec) -> None:
    user, own = {"role": "user", "content": "1"}, {"role": "system", "content": "7"}
    rows = rows_of(
        tmp_path / "a.jsonl",
        {"prompt": [user], "s": "9"},
        {"prompt": [user], "s": None},
        {"prompt": "1", "s": "9"},
        {"prompt": [own, user], "s": ""},
        {"prompt": [own, user], "s": "7"},
    )
    settings = {"system_key": "s", "prompt_as": "user_message"}
    nine, seven, none = "[system:9][user:1]", "[system:7][user:1]", "[user:1]"
    assert texts(rows, codec, **settings) == [nine, none, nine, seven, seven]
    assert texts(rows, codec, system_prompt="2", **settings)[1] == "[system:2][user:1]"
    of_source = [{"path": rows, "system_key": ""}]
    data = section(of_source, answer_key=None, chat_template=CHAT, **settings)
    assert next(iter(load_prompts(data, "train", codec))).text == none


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "s": "9"}, "is a text, which data.system_key cannot be put before: set data.prompt_as: user_"),
        ({"prompt": [{"role": "system", "content": "7"}, {"role": "user", "content": "1"}], "s": "9"}, "leave one out"),
        ({"prompt": "1"}, "has no 's': it has 'prompt'; set data.system_key"),
    ],
)
def test_a_system_prompt_that_has_no_place_is_named(
    tmp_path: Path, codec: TextCodec, row: object, message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        texts(rows_of(tmp_path / "a.jsonl", row), codec, system_key="s")


def test_a_template_that_loses_the_system_prompt_is_noticed(tmp_path: Path, codec: TextCodec) -> None:
    rows = rows_of(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "1"}], "s": "9"})
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for name, found in ((CHAT, set()), (template, {"data.system_key"})):
        data = section(rows, answer_key=None, chat_template=name, system_key="s")
        assert load_prompts(data, "train", codec).formats.lost_system == found


@pytest.mark.parametrize(("template", "text"), [(ASKING, "1calls"), (CHAT, "[user:1][assistant:][tool:]")])
def test_a_message_without_content_is_what_its_template_asks_for(
    tmp_path: Path, codec: TextCodec, template: str, text: str
) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    for content in ({}, {"content": None}):
        messages = [{"role": "user", "content": "1"}, call | content, {"role": "tool", "content": ""}]
        rows = rows_of(tmp_path / "a.jsonl", {"prompt": messages})
        assert texts(rows, codec, chat_template=template) == [text]


def test_rows_of_a_json_list_are_read_where_they_lie(tmp_path: Path, codec: TextCodec) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n} for n in range(5)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    source = load_prompts(section(tmp_path / "a.json"), "train", codec).sources[0]
    assert [(prompt.row, prompt.text, prompt.answer) for prompt in source.read([3, 0])] == [
        (4, "3+1=", "3"),
        (1, "0+1=", "0"),
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows[1:], indent=2))
    with pytest.raises(ConfigError, match=r"a\.json:4 is no longer what and where it was"):
        source[3]
