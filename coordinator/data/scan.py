"""One pass over the rows of a source: checks them, measures their prompts in tokens, and takes the files' digest.

Memory does not grow with the rows, but for what the callbacks keep of them.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from coordinator.data.columns import FileColumns
from coordinator.data.sources import RowSource, SourceFile
from servicekit.logs import get_logger
from tandem_clients.formatting import PromptFormat, PromptText
from tandem_files.digests import file_digest
from tandem_files.rows.files import is_parquet
from tandem_files.rows.problems import Faults, RowProblem
from tandem_files.rows.reading import Row, read_rows
from tandem_files.rows.values import BadRow

log = get_logger(__name__)

# Rows tokenized in one batch: they bound memory, and keep the tokenizer's threads busy.
_BATCH_ROWS = 2048
_BATCH_BYTES = 16 << 20
# Rows whose columns are noted.
_SEEN_ROWS = 1000
# Overlong prompts that are kept for messages.
_NAMED = 6
# Between messages about a pass that takes long.
_PROGRESS_S = 10.0

Report = Callable[[Path, float], None]
_Batch = list[tuple[Row, PromptText]]


@dataclass(kw_only=True, slots=True)
class Scan:
    """What a pass has found."""

    source: RowSource
    faults: Faults = field(default_factory=Faults)
    # Rows without a fault, and those of them that are used.
    num_rows: int = 0
    num_used: int = 0
    # Prompts longer than the limit, by the file's name; the first ones with their tokens, and the longest's.
    num_overlong: Counter[str] = field(default_factory=Counter)
    overlong: list[tuple[Row, int]] = field(default_factory=list)
    longest_overlong: int = 0
    # Tokens of the longest prompt that is used.
    longest: int = 0
    # Columns of the first rows, in their order.
    columns: list[str] = field(default_factory=list)
    # By file, the columns of all rows without a fault.
    by_file: dict[Path, FileColumns] = field(default_factory=dict)
    # By used prompt, in order, the hash of its text; 8 bytes each. Empty without a format.
    texts: "array[int]" = field(default_factory=lambda: array("Q"))
    # A template has written prompts.
    rendered: bool = False
    # Digest of all files' bytes, in order.
    digest: str = ""


def hash_of(text: PromptText) -> int:
    """Return the hash by which equal prompts are found."""
    return xxhash.xxh3_64_intdigest(text.text.encode(errors="surrogatepass"))


@dataclass(kw_only=True)
class Scanner:
    """Scans sources.

    Attributes:
        format: renders and tokenizes; None: rows are checked, and not measured.
        max_tokens: longest prompt that is used.
        keep: gets each row that is used.
        watchers: get the rows without faults, in batches, with their texts.
        report: gets the share of a file that has been read, every ten seconds.
    """

    format: PromptFormat | None
    max_tokens: int
    keep: Callable[[SourceFile, Row], None] = lambda file, row: None
    watchers: Sequence[Callable[[Sequence[tuple[Row, PromptText]]], None]] = ()
    report: Report = lambda file, share: log.info("reading data", file=str(file), share=round(share, 3))

    def scan(self, source: RowSource) -> Scan:
        """Read all rows of a source. Raises: DataError: a file as a whole cannot be read; OSError."""
        found = Scan(source=source)
        digest = xxhash.xxh3_128()
        for file in source.files:
            rows_before = found.num_rows
            for batch in self._batches(found, file, digest.update):
                self._measure(found, file, batch)
            if found.num_rows > rows_before:
                found.faults.note_sound_rows(file.path)
            if is_parquet(file.path):
                digest.update(file_digest(file.path)["xxh3_128"].encode())
        found.digest = digest.hexdigest()
        return found

    def _batches(self, found: Scan, file: SourceFile, hashed: Callable[[bytes], object]) -> Iterator[_Batch]:
        """Yield the file's rows that have a text, in batches; note the faults of the others."""
        batch: _Batch = []
        reported = time.monotonic()
        for item in read_rows(file.path, file.keys, hashed):
            if isinstance(item, RowProblem):
                found.faults.add(item)
                continue
            try:
                batch.append((item, self._text(item)))
            except BadRow as error:
                found.faults.add(item.problem(str(error)))
                continue
            if len(batch) == _BATCH_ROWS or item.offset - batch[0][0].offset > _BATCH_BYTES:
                yield batch
                batch = []
                if time.monotonic() - reported > _PROGRESS_S:
                    reported = time.monotonic()
                    self.report(file.path, item.share)
        if batch:
            yield batch

    def _text(self, row: Row) -> PromptText:
        if self.format is not None:
            return self.format.text(row)
        return PromptText(text=row.prompt if isinstance(row.prompt, str) else "", rendered=False)

    def _measure(self, found: Scan, file: SourceFile, batch: _Batch) -> None:
        sound: _Batch = []
        counted = found.by_file.setdefault(file.path, FileColumns())
        for (row, text), length in zip(batch, self._lengths(found, batch), strict=True):
            if length is None:
                continue
            sound.append((row, text))
            counted.add(row.number, row.columns.keys())
            if found.num_rows + len(sound) <= _SEEN_ROWS:
                found.columns += [name for name in row.columns if name not in found.columns]
            if length > self.max_tokens:
                self._note_overlong(found, file, row, length)
                continue
            found.num_used += 1
            found.longest = max(found.longest, length)
            found.rendered |= text.rendered
            if self.format is not None:
                found.texts.append(hash_of(text))
            self.keep(file, row)
        found.num_rows += len(sound)
        for watch in self.watchers:
            watch(sound)

    def _note_overlong(self, found: Scan, file: SourceFile, row: Row, length: int) -> None:
        found.num_overlong[file.name] += 1
        found.longest_overlong = max(found.longest_overlong, length)
        if len(found.overlong) < _NAMED:
            found.overlong.append((row, length))

    def _lengths(self, found: Scan, batch: _Batch) -> list[int | None]:
        """Return each prompt's tokens; None and a fault for one that has none or cannot be tokenized."""
        if self.format is None:
            return [0] * len(batch)
        try:
            lengths = [len(ids) for ids in self.format.encode([text for _, text in batch])]
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
            if len(batch) > 1:
                return [length for entry in batch for length in self._lengths(found, [entry])]
            found.faults.add(batch[0][0].problem(f"the tokenizer fails on a prompt: {error}; is it for this text?"))
            return [None]
        for (row, _), length in zip(batch, lengths, strict=True):
            if length == 0:
                found.faults.add(row.problem("the tokenizer makes no token of this prompt; is it for this text?"))
        return [length or None for length in lengths]
