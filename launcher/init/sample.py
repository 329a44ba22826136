"""Reads the first rows of each file: their prompts in tokens, and their answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.data.scan import hash_of
from coordinator.data.sources import SourceFile, find_sources
from tandem_clients.flow import DataKey
from tandem_clients.formatting import PromptFormat, PromptText
from tandem_config.schema import DataSection
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.rows.reading import Row, first_record, read_rows
from tandem_files.rows.values import BadRow

# Most rows of all files of a part together: a few seconds; `tandem check` reads all.
MAX_ROWS = 20_000
_BATCH_ROWS = 512


@dataclass(kw_only=True)
class RowSample:
    """What the rows hold.

    Attributes:
        lengths: of the prompts, in tokens.
        num_rows: of all files; estimated from the bytes read if `whole` is False.
        whole: all rows were read.
        texts: hashes of the prompts.
    """

    lengths: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    num_rows: int = 0
    whole: bool = True
    texts: set[int] = field(default_factory=set)

    @property
    def num_different(self) -> int:
        """Count the different prompts; estimated as `num_rows` is."""
        read = len(self.lengths)
        return round(self.num_rows * len(self.texts) / read) if read else 0


def first_row(section: DataSection, part: DataKey) -> tuple[str, dict[str, object]]:
    """Return the place (`file:line`) and the columns of the first row of a part. Raises: DataError; OSError."""
    file = find_sources(section, part)[0].files[0].path
    number, record = first_record(file)
    return f"{file}:{number}", record


def read_sample(section: DataSection, part: DataKey, formats: PromptFormat) -> RowSample:
    """Read up to MAX_ROWS rows of a part, as many of each file. Raises: DataError: a bad row or file; OSError."""
    sample = RowSample()
    files = [file for source in find_sources(section, part) for file in source.files]
    for file in files:
        batch: list[Row] = []
        for row in _first_rows(file, sample, max(1, MAX_ROWS // len(files))):
            batch.append(row)
            if len(batch) == _BATCH_ROWS:
                _measure(sample, batch, formats)
                batch = []
        _measure(sample, batch, formats)
    return sample


def _first_rows(file: SourceFile, sample: RowSample, most: int) -> Iterator[Row]:
    """Yield a file's rows, at most `most`, and note how many it has."""
    count, share = 0, 1.0
    for item in read_rows(file.path, file.keys):
        if isinstance(item, RowProblem):
            raise DataError([item.beside_sound_rows() if count else item])
        if count == most:
            sample.whole = False
            sample.num_rows += max(count + 1, round(count / share))
            return
        yield item
        count, share = count + 1, item.share
    sample.num_rows += count


def _measure(sample: RowSample, batch: list[Row], formats: PromptFormat) -> None:
    sample.answers += [row.answer for row in batch]
    texts = [_text(row, formats) for row in batch]
    sample.texts.update(map(hash_of, texts))
    sample.lengths += [len(ids) for ids in formats.encode(texts)] if batch else []


def _text(row: Row, formats: PromptFormat) -> PromptText:
    try:
        return formats.text(row)
    except BadRow as error:
        raise DataError([row.problem(str(error))]) from error
