"""Takes rows without end: a seeded order in each epoch, sources at the rates of their weights, exact resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.data.prompts import PromptSet
from coordinator.data.repeated_prompts import different_first
from servicekit.errors import ConfigError
from tandem_clients.flow import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePosition:
    """The position in a source, of which `num_prompts` can be used."""

    epoch: int
    position: int
    num_prompts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """The position of a cursor: that in each source, in the configuration's order."""

    sources: tuple[SourcePosition, ...]
    # What is shuffled where data repeat prompts: rows, as releases did that did not look for copies, or the different
    # prompts, all of which come before a copy.
    order: Literal["rows", "prompts"] = "rows"
    # How often prompts were taken: the number of the last wave. -1: once in each iteration (older releases).
    waves: int = -1

    @property
    def num_taken(self) -> int:
        """Count the prompts taken so far, over all epochs."""
        return sum(source.epoch * source.num_prompts + source.position for source in self.sources)

    @property
    def num_prompts(self) -> int:
        """Count the usable prompts of all sources."""
        return sum(source.num_prompts for source in self.sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    """Prompts that were read and not taken yet, and the position before them."""

    before: CursorState
    prompts: list[Prompt]


class DataCursor:
    """Iterates over a part's prompts without end, in a new order in each epoch of a source; its position can be saved.

    Sources take turns: the next prompt is always of the source that is furthest behind its share. So in every stretch
    of a run each has its share, not only on average.

    Args:
        texts: by source, hashes of its prompts' texts, to draw different prompts before copies; None: rows are drawn.
    """

    def __init__(
        self, prompts: PromptSet, *, seed: int, shuffle: bool, texts: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._prompts = prompts
        self._orders = [
            _Order(
                size=len(source), seed=seed, source=place, shuffle=shuffle, texts=() if texts is None else texts[place]
            )
            for place, source in enumerate(prompts.sources)
        ]
        self._weights = [source.weight for source in prompts.sources]
        self._ahead: _Ahead | None = None
        self._waves = 0

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, a wave; a source begins its next epoch when one ends.

        Raises: ConfigError: a data file has changed or is gone.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and len(ahead.prompts) != count:
            self.restore(ahead.before)
            ahead = None
        prompts = self._read(count) if ahead is None else ahead.prompts
        self._waves += 1
        return prompts

    def read_ahead(self, count: int) -> None:
        """Read the prompts that the next `take` of `count` returns; until then, the position is that before them.

        What cannot be read is left to that `take`, which says why.
        """
        if self._ahead is not None:
            return
        before = self.state()
        try:
            prompts = self._read(count)
        except ConfigError:
            self.restore(before)
        else:
            self._ahead = _Ahead(before=before, prompts=prompts)

    def _read(self, count: int) -> list[Prompt]:
        turns: list[int] = []
        wanted: list[list[int]] = [[] for _ in self._orders]
        for _ in range(count):
            turn = self._turn()
            turns.append(turn)
            wanted[turn].append(self._orders[turn].next())
        taken = [iter(source.read(rows)) for source, rows in zip(self._prompts.sources, wanted, strict=True)]
        return [next(taken[turn]) for turn in turns]

    def state(self) -> CursorState:
        """Return the position, for `restore`."""
        if self._ahead is not None:
            return self._ahead.before
        positions = tuple(order.position() for order in self._orders)
        by_prompt = any(order.by_prompt for order in self._orders)
        return CursorState(sources=positions, order="prompts" if by_prompt else "rows", waves=self._waves)

    @property
    def keeps_old_order(self) -> bool:
        """Whether it was restored to an order in which copies are drawn as any other row."""
        return any(order.has_copies and not order.by_prompt for order in self._orders)

    def restore(self, state: CursorState) -> None:
        """Go to a saved position.

        Raises: ValueError: the data have other sources or numbers of prompts than when the position was saved.
        """
        saved, own = [s.num_prompts for s in state.sources], [order.size for order in self._orders]
        if saved != own:
            raise ValueError(
                f"data.train has {_listed(own)} usable prompts, but the checkpoint was made with {_listed(saved)}: "
                "resume with the same data, or start a new run"
            )
        self._ahead, self._waves = None, max(state.waves, 0)
        for order, position in zip(self._orders, state.sources, strict=True):
            order.go_to(position, by_prompt=state.order == "prompts")

    def _turn(self) -> int:
        """Return the source of the next prompt: the one that would reach the middle of its next prompt first."""
        return min(range(len(self._orders)), key=lambda place: (self._orders[place].taken + 0.5) / self._weights[place])


class _Order:
    """The order of one source's rows.

    Attributes:
        by_prompt: whether different prompts are drawn before copies; False where there are none.
    """

    def __init__(self, *, size: int, seed: int, source: int, shuffle: bool, texts: Sequence[int]) -> None:
        if not size:
            raise ValueError("a data cursor needs at least one prompt in each source")
        self.size = size
        self._seed = seed
        self._source = source
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._prompts = _numbered(texts) if shuffle else None
        self.by_prompt = self._prompts is not None
        self._rows = self._epoch_order()

    @property
    def has_copies(self) -> bool:
        """Whether rows that are shuffled repeat prompts."""
        return self._prompts is not None

    @property
    def taken(self) -> int:
        """Count the prompts taken so far, over all epochs."""
        return self._epoch * self.size + self._position

    def next(self) -> int:
        """Return the next row's index."""
        if self._position == self.size:
            self._epoch, self._position = self._epoch + 1, 0
            self._rows = self._epoch_order()
        self._position += 1
        return int(self._rows[self._position - 1])

    def position(self) -> SourcePosition:
        """Return where the order is."""
        return SourcePosition(epoch=self._epoch, position=self._position, num_prompts=self.size)

    def go_to(self, position: SourcePosition, *, by_prompt: bool) -> None:
        """Go to a saved position in the order that it was saved in."""
        self.by_prompt = by_prompt and self._prompts is not None
        self._epoch, self._position = position.epoch, position.position
        self._rows = self._epoch_order()

    def _epoch_order(self) -> NDArray[np.uint32]:
        rows = np.arange(self.size, dtype=np.uint32)  # 4 bytes a row
        if self._shuffle:
            # Seeded by (seed, epoch, source): an epoch's order does not depend on how the run got there.
            np.random.default_rng([self._seed, self._epoch, self._source]).shuffle(rows)
        return different_first(rows, self._prompts) if self.by_prompt and self._prompts is not None else rows


def _numbered(texts: Sequence[int]) -> NDArray[np.int64] | None:
    """Number different texts by row; None: all are different."""
    different, numbers = np.unique(np.asarray(texts, np.uint64), return_inverse=True)
    return None if len(different) == len(numbers) else numbers.astype(np.int64)


def _listed(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
