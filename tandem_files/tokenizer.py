"""Encodes and decodes text with the `tokenizers` library, and reads the ids that end a completion."""

import json
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from tandem_files.digests import text_digest

# Texts decoded together by decode_all.
_DECODE_BATCH = 64
# Files of a model's folder: each may have ids that end or pad a text.
_MODEL_FILES = ("generation_config.json", "config.json")


class TextCodec:
    """The model's tokenizer, without the padding and truncation that its file may ask for.

    Args:
        folder: where it is from, with its chat templates; None: nowhere.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], folder: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.folder = folder
        self._digest = ""
        self._special = {
            id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._padding_ids = frozenset[int]()

    @classmethod
    def from_folders(cls, model: Path, tokenizer: Path | None = None) -> "TextCodec":
        """Load tokenizer.json from `tokenizer` (or the model's folder) and stop tokens from the model's configuration.

        Raises: FileNotFoundError / ValueError naming the file: it is missing, unreadable, has no stop token, or its
            token ids go beyond the model's vocabulary.
        """
        folder = tokenizer if tokenizer is not None else model
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: set model.tokenizer_path to a folder with tokenizer.json")
        try:
            loaded = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        padding = (loaded.padding or {}).get("pad_id")
        loaded.no_padding()
        loaded.no_truncation()
        _check_vocabulary(loaded, path, model)
        codec = cls(loaded, stop_token_ids(model, _id_of(loaded, folder, "eos_token")), folder)
        codec._padding_ids = _padding_ids(model, padding, _id_of(loaded, folder, "pad_token"))
        return codec

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, with the special tokens that the tokenizer's post-processor adds.

        A text that begins with them already (BOS, in a prompt rendered with a chat template) does not get them twice.
        """
        return [_once(encoding) for encoding in self._tokenizer.encode_batch_fast(list(texts))] if texts else []

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that a chat template has written: all special tokens are in them already."""
        if not texts:  # the library takes 0.1 ms for nothing
            return []
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def digest(self) -> str:
        """Compute the xxh3-128, in hex, of the tokenizer, once: two of the same digest encode alike."""
        if not self._digest:
            self._digest = text_digest(self._tokenizer.to_str())
        return self._digest

    def decode(
        self, sequences: Iterable[Sequence[int]], *, stop_ids: Collection[int] = (), skip_special_tokens: bool = False
    ) -> list[str]:
        """Decode what a policy wrote, for rewards: without the tokens that end or pad a text, wherever they are.

        Args:
            stop_ids: further ids that end a completion; those of ordinary text, as of `</answer>`, are kept.
            skip_special_tokens: leave out all special tokens.
        """
        left_out = self._left_out(stop_ids, skip_special_tokens)
        return self.decode_all([id_ for id_ in ids if id_ not in left_out] for ids in sequences)

    def left_out(self, *, stop_ids: Collection[int] = (), skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of the tokens that `decode` leaves out."""
        ids = self._left_out(stop_ids, skip_special_tokens)
        return [text for id_ in sorted(ids) if (text := self._tokenizer.id_to_token(id_)) is not None]

    def marks(self) -> dict[int, str]:
        """Return the texts of special tokens and of those that end a completion, by id."""
        ends = {id_: self._tokenizer.id_to_token(id_) for id_ in self.stop_token_ids}
        return self._special | {id_: text for id_, text in ends.items() if text}

    def unknown(self, token_ids: Iterable[int]) -> list[int]:
        """Return the ids for which there is no token."""
        return [id_ for id_ in token_ids if self._tokenizer.id_to_token(id_) is None]

    def as_written(self, text: str, *, stop_ids: Collection[int] = (), skip_special_tokens: bool = False) -> str:
        """Return a text as `decode` gives it if a policy writes it."""
        (ids,) = self.encode_rendered([text])
        if self._left_out(stop_ids, skip_special_tokens).isdisjoint(ids):
            return text  # which decoding could change: a tokenizer need not know all characters
        return self.decode([ids], stop_ids=stop_ids, skip_special_tokens=skip_special_tokens)[0]

    def _left_out(self, stop_ids: Collection[int], skip_special_tokens: bool) -> frozenset[int]:
        """Return the ids that `decode` leaves out; those of the model always end a completion, special or not."""
        chosen = self._special.keys() if skip_special_tokens else self._special.keys() & {*stop_ids, *self._padding_ids}
        return frozenset((*self.stop_token_ids, *chosen))

    def decode_all(self, sequences: Iterable[Sequence[int]]) -> list[str]:
        """Decode each sequence of token ids, with its special tokens: to show what a model saw and wrote."""
        texts: list[str] = []
        waiting = iter(sequences)
        # A batch's conversion holds the GIL: a thread that decodes millions of tokens must not stop the others.
        while batch := [list(ids) for ids in islice(waiting, _DECODE_BATCH)]:
            texts += self._tokenizer.decode_batch(batch, skip_special_tokens=False)
        return texts


def _once(encoding: Encoding) -> list[int]:
    """Return the ids without the special tokens that were put in front, if the text begins with the same ones."""
    ids = encoding.ids
    added = next((place for place, mark in enumerate(encoding.special_tokens_mask) if not mark), 0)
    return ids[added:] if ids[added : 2 * added] == ids[:added] else ids


def stop_token_ids(model: Path, of_tokenizer: int | None = None) -> tuple[int, ...]:
    """Read the ids that end a completion, ascending: those of generation_config.json, config.json and the tokenizer.

    They often differ: a base model's end of text, and the end of a turn that its chat model has learnt.

    Args:
        of_tokenizer: the tokenizer's end of sequence.
    Raises: ValueError: none of them has one.
    """
    found = set() if of_tokenizer is None else {of_tokenizer}
    for name in _MODEL_FILES:
        value = _read_object(model / name).get("eos_token_id")
        found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    if not found:
        raise ValueError(
            f"{model}: neither generation_config.json nor config.json has eos_token_id, and tokenizer_config.json no "
            "eos_token, so completions never end"
        )
    return tuple(sorted(found))


def _padding_ids(model: Path, *found: int | None) -> frozenset[int]:
    """Add the padding ids of generation_config.json and config.json to those that were found."""
    values = [*found, *(_read_object(model / name).get("pad_token_id") for name in _MODEL_FILES)]
    return frozenset(value for value in values if isinstance(value, int))


def _id_of(tokenizer: Tokenizer, folder: Path, role: str) -> int | None:
    """Find the id of tokenizer_config.json's `eos_token`, which is a string or the object of an added token."""
    token = _read_object(folder / "tokenizer_config.json").get(role)
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _check_vocabulary(tokenizer: Tokenizer, path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size")
    token, highest = max(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    if size is not None and highest >= size:
        raise ValueError(
            f"{path} does not match the model: token {token!r} has id {highest}, "
            f"but {model / 'config.json'} has vocab_size {size}"
        )
