"""Step 1: prompts. Rows are read, rendered and tokenized when they are taken; before, all are checked once."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from coordinator.data.row_offsets import RowStore
from coordinator.data.scan import Scan, Scanner
from coordinator.data.scan_cache import index_key, read_index
from coordinator.data.sources import RowSource, find_sources
from servicekit.logs import get_logger
from tandem_clients.flow import DataKey, Prompt
from tandem_clients.formatting import EpisodeTools, PromptFormat, prompt_format
from tandem_config.schema import DataSection
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.tokenizer import TextCodec

log = get_logger(__name__)

# Prompts tokenized together when all are wanted.
_CHUNK = 1024


class PromptSource(Sequence[Prompt]):
    """The usable prompts of a source; each is read and tokenized when it is asked for."""

    def __init__(self, scan: Scan, store: RowStore, formats: PromptFormat) -> None:
        self.scan = scan
        self._store = store
        self._format = formats

    @property
    def weight(self) -> float:
        """Rate at which prompts are drawn, relative to other sources."""
        return self.scan.source.weight

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[Prompt]:
        for start in range(0, len(self), _CHUNK):
            yield from self.read(range(start, min(start + _CHUNK, len(self))))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        places = range(len(self))[index]
        return self.read([places])[0] if isinstance(places, int) else self.read(places)

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        """Return prompts by index. Raises: ConfigError: a file has changed or is gone."""
        found = self._store.read(indices)
        texts = [self._format.text(row) for _, row in found]
        return [
            Prompt(
                row=row.number,
                token_ids=array("I", ids),
                answer=row.answer,
                file=str(file.path),
                file_label=file.label,
                source=file.name,
                text=text.text,
                messages=text.messages,
                columns=row.columns,
            )
            for (file, row), text, ids in zip(found, texts, self._format.encode(texts), strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a part of the data."""

    sources: tuple[PromptSource, ...]
    # Which renders and tokenizes them.
    formats: PromptFormat

    @property
    def scans(self) -> list[Scan]:
        """What was found in each source."""
        return [source.scan for source in self.sources]

    @property
    def num_prompts(self) -> int:
        """Count the prompts of all sources."""
        return sum(len(source) for source in self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """By a source's name, prompts left out because they were longer than data.max_prompt_tokens."""
        return dict(sum((source.scan.num_overlong for source in self.sources), Counter()))

    def __iter__(self) -> Iterator[Prompt]:
        for source in self.sources:
            yield from source


def load_prompts(
    section: DataSection,
    part: DataKey,
    codec: TextCodec,
    scratch: Path | None = None,
    episodes: EpisodeTools | None = None,
) -> PromptSet:
    """Find the files of a part, check and measure all rows, and keep where each lies.

    Args:
        scratch: the run's folder, for the launcher's index of the rows, and for copies of Parquet files' rows; None:
            there is no index, and copies are in the system's folder for temporary files.
        episodes: None: there is no environment.
    Raises: DataError: with the problems of all files; prompts longer than data.max_prompt_tokens are among them, unless
        data.overlong_prompts is "drop" and others are left. OSError; ValueError: a file cannot be read, the chat
        template cannot be used.
    """
    formats = prompt_format(section, codec, episodes)
    loaded = [_load(section, source, formats, scratch) for source in find_sources(section, part)]
    problems = [problem for source in loaded for problem in _problems(section, source.scan)]
    if problems:
        raise DataError(problems, sum(source.scan.faults.num_more for source in loaded))
    if formats.uses_clock:
        log.warning(
            "chat template writes the current time: prompts differ from day to day",
            advice="set it in data.chat_template_kwargs, e.g. date_string",
        )
    return PromptSet(sources=tuple(loaded), formats=formats)


def _load(section: DataSection, source: RowSource, formats: PromptFormat, scratch: Path | None) -> PromptSource:
    store = RowStore(scratch)
    index = None if scratch is None else read_index(scratch, index_key(section, source, formats), source)
    if index is not None:
        log.info("data: using the launcher's index", prompts=index.scan.num_used, file=str(source.files[0].path))
        for file in source.files:
            if file.path in index.places:
                store.fill(file, index.places[file.path])
        return PromptSource(index.scan, store, formats)
    scanner = Scanner(format=formats, max_tokens=section.max_prompt_tokens, keep=store.add)
    return PromptSource(scanner.scan(source), store, formats)


def _problems(section: DataSection, scan: Scan) -> Iterator[RowProblem]:
    yield from scan.faults.problems
    limit = f"data.max_prompt_tokens = {section.max_prompt_tokens}"
    if scan.num_overlong and section.overlong_prompts == "error":
        row, length = scan.overlong[0]
        others = tuple(other.number for other, _ in scan.overlong[1:])
        yield RowProblem(
            file=row.file,
            number=row.number,
            message=f"the prompt has {length} tokens, more than {limit}: raise it to {scan.longest_overlong}, or set "
            "data.overlong_prompts=drop",
            num_others=scan.num_overlong.total() - 1,
            others=others,
        )
    elif scan.num_overlong and not scan.num_used:
        yield RowProblem(file=scan.source.files[0].path, number=None, message=f"every prompt is longer than {limit}")
