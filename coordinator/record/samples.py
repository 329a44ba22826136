"""The sink that stores samples: turns a finished iteration into Parquet files, and keeps them within their budget.

Legend: P prompts, G completions per prompt.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.flow import Completion, Generation, Group, Scored
from coordinator.record.report import IterationRecord
from coordinator.record.sinks import Finished
from tandem_config.schema import SamplesSection
from tandem_files.atomic import nothing_more
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import DROPPED, EVALUATED, MASKED, TRAIN, TRAINED, StoredSample, TextSpan
from tandem_files.tokenizer import TextCodec

_MIB = 2**20


@dataclass(kw_only=True)
class SampleSink:
    """Stores the samples of finished iterations.

    Attributes:
        truncated: grpo.truncated.
        last_look: called immediately before a file is written; raises if this coordinator no longer leads the run.
    """

    folder: SampleFolder
    settings: SamplesSection
    codec: TextCodec
    truncated: Literal["keep", "mask"]
    last_look: Callable[[], None] = nothing_more
    _sizes: dict[int, int] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """What the warning calls it when it fails."""
        return "storing samples"

    def take(self, finished: Finished) -> None:
        """Store an iteration."""
        iteration = int(finished.row["iteration"] or 0)
        sizes = self._begin(iteration)
        written = 0
        chosen = iteration <= 1 or iteration % self.settings.every == 0 or bool(finished.evaluated)
        if finished.record is not None and chosen:
            record = finished.record
            uses = _uses(record, self.truncated)
            samples = self._samples(TRAIN, iteration, record.generation, record.scored, record.advantages_PG, uses)
            written += self.folder.write(iteration, TRAIN, samples, self.last_look)
        for evaluated in finished.evaluated:
            samples = self._samples(evaluated.name, iteration, evaluated.generation, evaluated.scored)
            written += self.folder.write(iteration, evaluated.name, samples, self.last_look)
        if written:
            sizes[iteration] = sizes.get(iteration, 0) + written
        for number in surplus(sizes, self.settings.max_mib * _MIB):
            self.folder.remove(number)
            del sizes[number]

    def close(self) -> None:
        """Do nothing: files are complete when they are written."""

    def _begin(self, iteration: int) -> dict[int, int]:
        """Return the bytes of the stored iterations; first remove those that this process repeats after a resume."""
        if self._sizes is None:
            self._sizes = self.folder.sizes()
            for number in [number for number in self._sizes if number >= iteration]:
                self.last_look()
                self.folder.remove(number)
                del self._sizes[number]
        return self._sizes

    def _samples(
        self,
        kind: str,
        iteration: int,
        generation: Generation,
        scored: Scored,
        advantages_PG: Any = None,
        uses: Sequence[Sequence[str]] | None = None,
    ) -> list[StoredSample]:
        prompts = self.codec.decode_all(group.prompt.token_ids for group in generation.groups)
        texts = iter(self.codec.decode_all(_completions(generation)))
        return [
            StoredSample(
                kind=kind,
                iteration=iteration,
                group_id=group.group_id,
                sample=g,
                source=group.prompt.file,
                row=group.prompt.row,
                prompt=prompts[p],
                completion=next(texts),
                answer=group.prompt.answer,
                columns=_columns(group),
                reward=float(scored.rewards_PG[p, g]),
                reward_parts={name: float(part_PG[p, g]) for name, part_PG in scored.parts.items()},
                advantage=None if advantages_PG is None else float(advantages_PG[p, g]),
                prompt_tokens=len(group.prompt.token_ids),
                num_tokens=len(completion.token_ids),
                finish_reason="length" if completion.truncated else "stop",
                use=EVALUATED if uses is None else uses[p][g],
                policy_version=completion.oldest_version,
                version_spans=self._spans(completion),
                token_ids=list(completion.token_ids) if self.settings.token_ids else None,
            )
            for p, group in enumerate(generation.groups)
            for g, completion in enumerate(group.completions)
        ]

    def _spans(self, completion: Completion) -> tuple[TextSpan, ...]:
        """Find where in the text each span of a version ends; a completion of one version, so nearly each, has none."""
        if len(completion.version_spans) < 2:
            return ()
        beginnings = self.codec.decode_all(completion.token_ids[:end] for end, _ in completion.version_spans)
        return tuple(
            TextSpan(end=end, text_end=len(text), policy_version=version)
            for (end, version), text in zip(completion.version_spans, beginnings, strict=True)
        )


def _completions(generation: Generation) -> Iterator[Sequence[int]]:
    return (completion.token_ids for group in generation.groups for completion in group.completions)


def _columns(group: Group) -> str:
    return json.dumps(dict(group.prompt.columns), default=str)


def _uses(record: IterationRecord, truncated: str) -> list[list[str]]:
    """Return what became of each sample in training, [P, G]."""

    def use(completion: Completion, *, dropped: bool) -> str:
        if dropped:
            return DROPPED
        return MASKED if completion.truncated and truncated == "mask" else TRAINED

    return [
        [use(completion, dropped=dropped) for completion in group.completions]
        for group, dropped in zip(record.generation.groups, record.dropped_P.tolist(), strict=True)
    ]


def surplus(sizes: Mapping[int, int], max_bytes: int) -> list[int]:
    """Choose the iterations to remove, so that the others fit.

    The one goes whose removal leaves the smallest gap, in proportion to its age: the first and the newest stay, recent
    ones densely, older ones further and further apart.

    >>> surplus({1: 10, 2: 10, 3: 10, 4: 10, 5: 10, 6: 10}, max_bytes=40)
    [2, 4]
    >>> surplus({1: 10, 2: 10}, max_bytes=5)
    [1]
    """
    left, removed = sorted(sizes), list[int]()
    total = sum(sizes.values())
    while total > max_bytes and len(left) > 1:
        newest = left[-1]
        inner = range(1, len(left) - 1)
        place = min(inner, key=lambda k: ((left[k + 1] - left[k - 1]) / (newest - left[k] + 1), k), default=0)
        number = left.pop(place)
        removed.append(number)
        total -= sizes[number]
    return removed
