"""What rewards read of a completion: all that the policy wrote, but the tokens that end or pad it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tandem_files.tokenizer import TextCodec

SPECIAL = ["<pad>", "<eos>", "<think>", "</think>", "<stop>", "<turn>"]
PAD, EOS, THINK, CLOSE, STOP, TURN = range(6)


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return byte_level(tmp_path)


def byte_level(folder: Path, *, plain_eos: bool = False, **config: Any) -> TextCodec:
    """Make a tokenizer of bytes: an emoji is four tokens."""
    vocabulary = {name: place for place, name in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet()), "</answer>"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in SPECIAL if not plain_eos or name != "<eos>"]
    )
    tokenizer.add_tokens([AddedToken("</answer>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": {"content": "<pad>"}}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary), "eos_token_id": EOS} | config))
    return TextCodec.from_folders(folder)


def ids(codec: TextCodec, text: str) -> list[int]:
    return codec.encode_rendered([text])[0]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<think>2 and 2</think>4<eos>", "<think>2 and 2</think>4"),
        ("4<eos><pad><pad>", "4"),
        ("<pad>4<pad>", "4"),
        ("4<turn>5<eos>", "4<turn>5"),
        ("one<eos>two<eos>", "onetwo"),
        ("4 \N{GRINNING FACE}<eos>", "4 \N{GRINNING FACE}"),
        ("<answer>4</answer><eos>", "<answer>4</answer>"),
        ("", ""),
        ("<eos>", ""),
    ],
)
def test_rewards_read_what_the_policy_wrote_but_ends_and_padding(codec: TextCodec, written: str, read: str) -> None:
    assert codec.decode([ids(codec, written)]) == [read]


def test_a_stop_id_of_the_configuration_is_left_out_if_it_is_a_special_token(codec: TextCodec) -> None:
    close = ids(codec, "</answer>")
    assert len(close) == 1
    written = [ids(codec, "<think>4<stop>"), ids(codec, "<answer>4</answer>")]
    assert codec.decode(written, stop_ids=[STOP, *close]) == ["<think>4", "<answer>4</answer>"]


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_all_ends_of_the_model_and_its_padding_are_left_out(tmp_path: Path, where: str) -> None:
    byte_level(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text()) if where == "config.json" else {}
    ends = {"eos_token_id": [EOS, TURN], "pad_token_id": STOP}
    (tmp_path / where).write_text(json.dumps(known | ends))
    codec = TextCodec.from_folders(tmp_path)
    assert codec.decode([ids(codec, "<think>4<turn>"), ids(codec, "5<eos><stop>")]) == ["<think>4", "5"]


def test_an_end_that_is_no_special_token_is_left_out_too_and_padding_of_ordinary_text_is_kept(tmp_path: Path) -> None:
    codec = byte_level(tmp_path, plain_eos=True, pad_token_id=6)
    text = codec.decode_all([[6]])[0]
    assert codec.decode([[THINK, 6, EOS]]) == [f"<think>{text}"]


def test_special_tokens_can_be_skipped(codec: TextCodec) -> None:
    assert codec.decode([ids(codec, "<think>2</think>4<eos>")], skip_special_tokens=True) == ["24"]
    assert codec.left_out() == ["<pad>", "<eos>"]
    assert codec.left_out(skip_special_tokens=True) == SPECIAL


def test_a_text_of_ones_own_is_read_as_if_the_policy_had_written_it(codec: TextCodec) -> None:
    assert codec.as_written("<think>1</think>4<eos>") == "<think>1</think>4"
    assert codec.as_written("<think>4", skip_special_tokens=True) == "4"
    assert codec.as_written("  4 \N{GRINNING FACE}") == "  4 \N{GRINNING FACE}"


def test_ids_that_the_tokenizer_does_not_know_say_nothing(codec: TextCodec) -> None:
    assert codec.decode([[900, *ids(codec, "4")]]) == ["4"]
