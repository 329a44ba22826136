"""The sink that stores samples: turns a finished iteration into Parquet files, and keeps them within their budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.learn.evaluation import EvaluationResult
from coordinator.record.samples.table import Batch, table_of_batch
from coordinator.record.sinks import FinishedIteration
from coordinator.rewards.taken import ShownColumns
from tandem_clients.flow import IterationRecord
from tandem_config.schema import SamplesSection
from tandem_files.atomic import no_check
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import DROPPED, EVALUATED, MASKED, TRAIN, TRAINED, UNSCORED
from tandem_files.tokenizer import TextCodec

_MIB = 2**20
# Iterations whose samples are kept, whatever they take: each costs entries of a folder that is listed.
MOST_ITERATIONS = 2_000


@dataclass(kw_only=True)
class SampleSink:
    """Stores the samples of finished iterations.

    Attributes:
        truncated: grpo.truncated.
        taken: the columns that the rewards take.
        before_write: called immediately before a file is written; raises if this coordinator no longer leads the run.
        left: called, in the sink's thread, with what could not be removed (tandem_files.atomic.remove_each).
    """

    folder: SampleFolder
    settings: SamplesSection
    codec: TextCodec
    truncated: Literal["keep", "mask"]
    taken: ShownColumns = field(default_factory=ShownColumns)
    before_write: Callable[[], None] = no_check
    left: Callable[[Sequence[str]], object] = lambda _: None
    _sizes: dict[int, int] | None = field(default=None, init=False)
    # Iterations that are to be removed.
    _old: set[int] = field(default_factory=set, init=False)

    @property
    def name(self) -> str:
        """What the warning calls it when it fails."""
        return "storing samples"

    def take(self, finished: FinishedIteration) -> str | None:
        """Store an iteration. Returns: a warning of those that an earlier process has not stored; None: it has all."""
        iteration = int(finished.row["iteration"] or 0)
        is_first = self._sizes is None
        sizes = self._begin(iteration)
        first = max(sizes, default=0) + 1
        lost = [number for number in range(first, iteration) if is_first and number % self.settings.every == 0]
        written = 0
        chosen = iteration <= 1 or iteration % self.settings.every == 0 or bool(finished.evaluated)
        if finished.record is not None and chosen:
            written += self._write(self._trained(iteration, finished.record))
        for evaluated in finished.evaluated:
            written += self._write(self._evaluated(iteration, evaluated))
        if written:
            sizes[iteration] = sizes.get(iteration, 0) + written
        for number in surplus(sizes, self.settings.max_mib * _MIB):
            self._old.add(number)
            del sizes[number]
        self._remove_old()
        return f"there are no samples of {len(lost)} iterations, {lost[0]} to {lost[-1]}" if lost else None

    def close(self) -> None:
        """Do nothing: files are complete when they are written."""

    def _begin(self, iteration: int) -> dict[int, int]:
        """Return the bytes of the stored iterations; first remove those that this process repeats after a resume."""
        if self._sizes is None:
            self._sizes = self.folder.sizes()
            for number in [number for number in self._sizes if number >= iteration]:
                self._old.add(number)
                del self._sizes[number]
            if self._old:
                self._remove_old()
        self._old.discard(iteration)  # what is left of it is replaced now
        return self._sizes

    def _remove_old(self) -> None:
        """Remove what does not count any more; what cannot be removed is tried again with the next iteration."""
        left = {number: self.folder.remove(number, self.before_write) for number in sorted(self._old)}
        self._old = {number for number, texts in left.items() if texts}
        self.left([text for texts in left.values() for text in texts])

    def _trained(self, iteration: int, record: IterationRecord) -> Batch:
        return Batch(
            iteration=iteration,
            kind=TRAIN,
            generation=record.generation,
            scored=record.scored,
            advantages_PG=record.advantages_PG,
            uses_PG=_uses(record, self.truncated),
        )

    def _evaluated(self, iteration: int, evaluated: EvaluationResult) -> Batch:
        return Batch(
            iteration=iteration,
            kind=evaluated.name,
            generation=evaluated.generation,
            scored=evaluated.scored,
            advantages_PG=None,
            uses_PG=np.where(evaluated.scored.present_PG, EVALUATED, UNSCORED),
        )

    def _write(self, batch: Batch) -> int:
        table = table_of_batch(batch, self.codec, token_ids=self.settings.token_ids, taken=self.taken)
        return self.folder.write(batch.iteration, batch.kind, table, self.before_write)


def _uses(record: IterationRecord, truncated: str) -> NDArray[np.str_]:
    """Return what became of each sample in training, [P, G]."""
    cut_PG = np.array(
        [[completion.truncated for completion in group.completions] for group in record.generation.groups]
    )
    trained_PG = np.where(cut_PG & (truncated == "mask"), MASKED, TRAINED)
    uses_PG = np.where(record.dropped_P[:, None], DROPPED, trained_PG)
    return np.where(record.scored.present_PG, uses_PG, UNSCORED)


def surplus(sizes: Mapping[int, int], max_bytes: int, most: int = MOST_ITERATIONS) -> list[int]:
    """Choose the iterations to remove, so that the others fit, and are at most so many.

    The one goes whose removal leaves the smallest gap, in proportion to its age: the first and the newest stay, recent
    ones densely, older ones further and further apart.

    >>> surplus({1: 10, 2: 10, 3: 10, 4: 10, 5: 10, 6: 10}, max_bytes=40)
    [2, 4]
    >>> surplus({1: 10, 2: 10}, max_bytes=5), surplus({1: 1, 2: 1, 3: 1}, max_bytes=5, most=2)
    ([1], [2])
    """
    left, removed = sorted(sizes), list[int]()
    total = sum(sizes.values())
    while (total > max_bytes or len(left) > most) and len(left) > 1:
        newest = left[-1]
        inner = range(1, len(left) - 1)
        place = min(inner, key=lambda k: ((left[k + 1] - left[k - 1]) / (newest - left[k] + 1), k), default=0)
        number = left.pop(place)
        removed.append(number)
        total -= sizes[number]
    return removed
