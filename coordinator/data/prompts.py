"""Step 1: prompts. Tokenizes rows; a data cursor shuffles them by epoch and can be resumed exactly."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from coordinator.flow import Prompt
from tandem_config.schema import DataSection
from tandem_files.data_rows import DataError, Row, RowProblem, read_rows
from tandem_files.tokenizer import TextCodec

# Rows tokenized in one batch: bounds memory, keeps the tokenizer's threads busy.
_ENCODE_BATCH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of one data file."""

    prompts: tuple[Prompt, ...]
    # Prompts left out because they were longer than data.max_prompt_tokens.
    num_dropped: int

    def digest(self) -> str:
        """Compute the xxh3-128, in hex, of all prompts' tokens and answers in order; the file does not matter."""
        digest = xxhash.xxh3_128()
        for prompt in self.prompts:
            digest.update(json.dumps([list(prompt.token_ids), prompt.answer]).encode())
        return digest.hexdigest()


def load_prompts(section: DataSection, part: Literal["train", "heldout"], codec: TextCodec) -> PromptSet:
    """Read, validate and tokenize a data file.

    Raises: DataError: with the file's problems; prompts longer than data.max_prompt_tokens are among them, unless
        data.overlong_prompts is "drop" and others are left.
    """
    path = section.train if part == "train" else section.heldout
    if path is None:
        raise ValueError(f"data.{part} is not set")
    result = read_rows(path, prompt_key=section.prompt_key, answer_key=section.answer_key)
    if result.problems:
        raise DataError(result.problems, result.more_problems)
    prompts = [
        Prompt(row=row.number, token_ids=ids, answer=row.answer, text=row.prompt)
        for start in range(0, len(result.rows), _ENCODE_BATCH)
        for row, ids in _encode(result.rows[start : start + _ENCODE_BATCH], codec)
    ]
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > section.max_prompt_tokens]
    if overlong and section.overlong_prompts == "error":
        problems = [RowProblem(file=path, number=p.row, message=_overlong(p, section)) for p in overlong[:20]]
        raise DataError(problems, len(overlong) - len(problems))
    kept = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= section.max_prompt_tokens)
    if not kept:
        message = f"every prompt is longer than data.max_prompt_tokens = {section.max_prompt_tokens}"
        raise DataError([RowProblem(file=path, number=None, message=message)])
    return PromptSet(prompts=kept, num_dropped=len(overlong))


def _encode(rows: Sequence[Row], codec: TextCodec) -> Iterator[tuple[Row, list[int]]]:
    return zip(rows, codec.encode([row.prompt for row in rows]), strict=True)


def _overlong(prompt: Prompt, section: DataSection) -> str:
    return (
        f"the prompt has {len(prompt.token_ids)} tokens, more than data.max_prompt_tokens = "
        f"{section.max_prompt_tokens}: raise it, or set data.overlong_prompts=drop"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """The position of a cursor."""

    epoch: int
    position: int
    num_prompts: int


class DataCursor:
    """Iterates over prompts without end, in a new seeded order in each epoch; its position can be saved."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("a data cursor needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, from the next epoch when this one ends."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            end = min(len(self._order), self._position + count - len(taken))
            taken.extend(self._prompts[i] for i in self._order[self._position : end].tolist())
            self._position = end
        return taken

    def state(self) -> CursorState:
        """Return the position, for `restore`."""
        return CursorState(epoch=self._epoch, position=self._position, num_prompts=len(self._prompts))

    def restore(self, state: CursorState) -> None:
        """Go to a saved position.

        Raises: ValueError: the data has another number of prompts than when the position was saved.
        """
        if state.num_prompts != len(self._prompts):
            raise ValueError(
                f"data.train has {len(self._prompts)} usable prompts, but the checkpoint was made with "
                f"{state.num_prompts}: resume with the same data, or start a new run"
            )
        self._epoch, self._position = state.epoch, state.position
        self._order = self._epoch_order()

    def _epoch_order(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        # Seeded by (seed, epoch): an epoch's order does not depend on how the run got there.
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._prompts))
