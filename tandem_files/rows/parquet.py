"""Reads a Parquet file batch by batch, its values as JSON would hold them."""

import base64
import datetime
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from tandem_files.rows.problems import DataError
from tandem_files.rows.values import number_text

# Rows decoded together, and their bytes; columns are read in pieces, however large the file's row groups are.
_BATCH_ROWS = 1024
_BATCH_BYTES = 16 << 20
_READ_BYTES = 1 << 20


def read_records(path: Path) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Yield (row from 1, share of the file read, its columns).

    Raises: DataError: the file is torn.
    """
    # Imported here: it takes 0.2 s and most data is JSONL.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            total = max(1, file.metadata.num_rows)
            groups = (file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
            batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * total // max(1, sum(groups))))
            singles = [
                field.name for field in file.schema_arrow if field.type in (pyarrow.float16(), pyarrow.float32())
            ]
            for batch in file.iter_batches(batch_size=batch_rows, use_threads=False):
                texts = {name: batch.column(name).cast(pyarrow.string()).to_pylist() for name in singles}
                for place, record in enumerate(batch.to_pylist()):
                    # As double precision, 0.1 in single precision would be 0.10000000149011612.
                    record |= {name: column[place] and float(column[place]) for name, column in texts.items()}
                    number += 1
                    yield number, number / total, {name: _plain(value) for name, value in record.items()}
    except (pyarrow.ArrowException, OSError) as error:
        where = f" after row {number}" if number else ""
        raise DataError.of(path, f"is not a readable Parquet file{where}: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it: times, decimals and bytes are texts."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return _text_of(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return number_text(value) if isinstance(value, Decimal) and value.is_finite() else str(value)


def _text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()
