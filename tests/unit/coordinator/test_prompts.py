from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from coordinator.data.prompts import CursorState, DataCursor, load_prompts
from coordinator.flow import Prompt
from tandem_config.schema import DataSection
from tandem_files.data_rows import DataError
from tandem_files.tokenizer import TextCodec, stop_token_ids
from tests.kit.folders import EOS, encode, write_data, write_small_model

PROMPTS = [Prompt(row=i + 1, token_ids=[i], answer=str(i)) for i in range(7)]


def taken(cursor: DataCursor, *counts: int) -> list[list[int]]:
    return [[prompt.row for prompt in cursor.take(count)] for count in counts]


def test_an_epoch_takes_every_prompt_once() -> None:
    cursor = DataCursor(PROMPTS, seed=3, shuffle=True)
    rows = [row for part in taken(cursor, 3, 3, 3, 5) for row in part]
    assert Counter(rows[:7]) == Counter(rows[7:]) == Counter(range(1, 8))
    assert rows[:7] != rows[7:]


def test_orders_depend_on_the_seed_alone() -> None:
    orders = [taken(DataCursor(PROMPTS, seed=seed, shuffle=True), 14) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_the_files_order_repeats() -> None:
    assert taken(DataCursor(PROMPTS, seed=0, shuffle=False), 5, 5) == [[1, 2, 3, 4, 5], [6, 7, 1, 2, 3]]


def test_a_take_larger_than_the_data_spans_epochs() -> None:
    assert Counter(taken(DataCursor(PROMPTS, seed=0, shuffle=True), 21)[0]) == Counter(list(range(1, 8)) * 3)


@pytest.mark.parametrize("before", [0, 1, 6, 7, 8, 20])
def test_a_restored_cursor_goes_on_exactly(before: int) -> None:
    original = DataCursor(PROMPTS, seed=5, shuffle=True)
    original.take(before)
    restored = DataCursor(PROMPTS, seed=5, shuffle=True)
    restored.restore(original.state())
    assert taken(original, 4, 9) == taken(restored, 4, 9)


def test_other_data_is_refused_on_restore() -> None:
    cursor = DataCursor(PROMPTS, seed=0, shuffle=True)
    with pytest.raises(ValueError, match=r"data.train has 7 usable prompts, but the checkpoint was made with 8"):
        cursor.restore(CursorState(epoch=0, position=0, num_prompts=8))


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_folders(write_small_model(tmp_path / "model"))


def section(path: Path, **settings: object) -> DataSection:
    return DataSection.model_validate({"train": path, **settings})


def test_prompts_are_tokenized(tmp_path: Path, codec: TextCodec) -> None:
    data = section(write_data(tmp_path / "a.jsonl", [(10, 20), (7, 5)]))
    loaded = load_prompts(data, "train", codec)
    assert [(p.row, list(p.token_ids), p.answer) for p in loaded.prompts] == [
        (1, encode("10+20="), "30"),
        (2, encode("7+5="), "12"),
    ]
    assert loaded.num_dropped == 0


def test_overlong_prompts_by_policy(tmp_path: Path, codec: TextCodec) -> None:
    path = write_data(tmp_path / "a.jsonl", [(10, 20), (7, 5), (11, 12)])
    with pytest.raises(DataError) as caught:
        load_prompts(section(path, max_prompt_tokens=5), "train", codec)
    assert [problem.number for problem in caught.value.problems] == [1, 3]
    assert "has 6 tokens, more than data.max_prompt_tokens = 5" in str(caught.value)
    dropped = load_prompts(section(path, max_prompt_tokens=5, overlong_prompts="drop"), "train", codec)
    assert ([prompt.row for prompt in dropped.prompts], dropped.num_dropped) == ([2], 2)
    with pytest.raises(DataError, match="every prompt is longer"):
        load_prompts(section(path, max_prompt_tokens=2, overlong_prompts="drop"), "train", codec)


def test_bad_rows_stop_the_load(tmp_path: Path, codec: TextCodec) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: has no 'answer'"):
        load_prompts(section(path), "train", codec)


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
