"""Stop strings in an engine that works on token ids: the scheduler gets a decoder for the tail of a completion.

SGLang looks for stop strings in the text of the last tokens, for which its requests need a tokenizer; with
`skip_tokenizer_init` they have none, and its SamplingParams refuse stop strings. The service therefore sets the strings
in the tokenized requests (`watch_for`), and the scheduler gets `StopText` as its tokenizer. A completion keeps all of
its sampled tokens, those of the stop string included, each with its log-prob.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"


class StopText:
    """What SGLang's requests read of a tokenizer; the file is opened with the first stop string.

    Args:
        folder: that of tokenizer.json.
    """

    # Stop tokens come with each request.
    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / TOKENIZER_FILE

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._path))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, special ones too: a stop string may be one."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def give_stop_text(result: Any, scheduler: Any, folder: str) -> None:
    """Give the scheduler its decoder, after Scheduler.init_tokenizer."""
    if scheduler.tokenizer is None:
        scheduler.tokenizer = StopText(folder)


def watch_for(params: Any, stop: Sequence[str]) -> None:
    """Set the stop strings of a tokenized request's SamplingParams."""
    params.stop_strs = list(stop)
    # SGLang decodes one token more than this. A token that is seen holds a byte at least. So no spelling of a stop
    # string is longer, however the policy cuts it into tokens.
    params.stop_str_max_len = max((len(text.encode()) for text in stop), default=0)
