"""The columns of stored samples, as Parquet has them and as Python objects. Adding columns breaks no reader."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa

# Samples of the training data; other kinds are the names of evaluation sets.
TRAIN = "train"
# What became of a sample in training: its tokens count in the loss; its group was left out, because all of its rewards
# were equal; it was cut off by the length limit and counts in no loss; it has no reward (failed, or none applies); it
# belongs to an evaluation.
TRAINED, DROPPED, MASKED, UNSCORED, EVALUATED = "trained", "dropped", "masked", "unscored", "evaluated"

# An element of version_spans: tokens of one version end before `end`, and in the text before `text_end`.
SPAN = pa.struct([("end", pa.int32()), ("text_end", pa.int32()), ("policy_version", pa.int64())])
# An element of masked_spans: tokens from `start` to before `end`, and the same in characters of the text.
MASKED_SPAN = pa.struct([(name, pa.int32()) for name in ("start", "end", "text_start", "text_end")])
SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),
        ("kind", pa.string()),
        ("group_id", pa.string()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("columns", pa.string()),
        ("reward_columns", pa.list_(pa.string())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("errors", pa.map_(pa.string(), pa.string())),
        ("advantage", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("num_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("use", pa.string()),
        ("policy_version", pa.int64()),
        ("version_spans", pa.list_(SPAN)),
        ("masked_spans", pa.list_(MASKED_SPAN)),
        ("transcript", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
    ],
    metadata={"tandem.samples": "1"},
)
# Few different values, or the same for all samples of a group.
_LISTS = ["reward_columns.list.element"]
REPEATED = ["kind", "group_id", "source", "prompt", "answer", "columns", *_LISTS, "finish_reason", "use"]
# By a Parquet column's path: zstd for the long ones; for all of them it would double the time of writing short samples.
_LONG = ("prompt", "completion", "answer", "columns", "transcript", "token_ids.list.element")
_NAMES = [column.name for column in SCHEMA if not pa.types.is_nested(column.type)]
_MAPS = [column.name for column in SCHEMA if pa.types.is_map(column.type)]
_SHORT = [*_NAMES, *_LISTS, *(f"{name}.key_value.{side}" for name in _MAPS for side in ("key", "value"))]
COMPRESSION = {**dict.fromkeys(_SHORT, "lz4"), **dict.fromkeys(_LONG, "zstd")}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleHead:
    """A stored sample without its texts and tokens."""

    kind: str
    group_id: str
    # Index in its group, from 0.
    sample: int
    # The data file, and the 1-based line or row in it.
    source: str
    row: int
    # None: unscored.
    reward: float | None
    # None: of an evaluation.
    advantage: float | None
    # Tokens of the completion, the stop token included.
    num_tokens: int
    # stop, or length: cut off by the length limit.
    finish_reason: str
    # TRAINED, DROPPED, MASKED, UNSCORED or EVALUATED.
    use: str
    # The reward's name -> why it could not score the sample; empty in files of older releases.
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpan:
    """Consecutive tokens of one policy version, which end before token `end` and character `text_end`."""

    end: int
    text_end: int
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSpan:
    """Consecutive tokens that the policy has not sampled, `start` to before `end`, and where they are in the text."""

    start: int
    end: int
    text_start: int
    text_end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample(SampleHead):
    """A stored sample."""

    iteration: int
    # What the model saw and wrote, with its special tokens.
    prompt: str
    completion: str
    answer: str
    # The data row's columns, as a JSON object.
    columns: str = "{}"
    # Names of those that rewards take, prompt and answer apart; none in files of older releases.
    reward_columns: Sequence[str] = ()
    # Unweighted scores by the reward's name; 0 if it failed.
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int
    # Oldest among the tokens.
    policy_version: int
    version_spans: Sequence[TextSpan] = ()
    # Those in no loss, because they are not the policy's; none in files of older releases.
    masked_spans: Sequence[MaskedSpan] = ()
    # An episode with an environment, as a JSON object: messages after the prompt, rewards of its turns, why it has
    # ended (done, max_turns, max_tokens, timeout, failed), error; "": there is none.
    transcript: str = ""
    # None: not stored (samples.token_ids).
    token_ids: Sequence[int] | None = None

    @property
    def sample_id(self) -> str:
        """Name of the sample, as in the trainer's errors: `i12.g3.row77#5`."""
        return f"{self.group_id}#{self.sample}"


def mean_reward(heads: Iterable[SampleHead]) -> float | None:
    """Average the rewards of those that have one; None: none has."""
    rewards = [head.reward for head in heads if head.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


HEAD_COLUMNS = [column.name for column in fields(SampleHead)]


def table_of(size: int, **columns: Any) -> pa.Table:
    """Make a table of `size` samples from columns: Arrow or NumPy arrays, or lists; missing or None: null."""

    def column(name: str, kind: pa.DataType) -> pa.Array:
        values = columns.get(name)
        if values is None:
            return pa.nulls(size, kind)
        return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)

    return pa.table([column(name, kind) for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)], schema=SCHEMA)


def heads_of(table: pa.Table) -> list[SampleHead]:
    """Read a table that has HEAD_COLUMNS only."""
    return [SampleHead(**row) for row in _rows(table, HEAD_COLUMNS)]


def samples_of(table: pa.Table) -> list[StoredSample]:
    """Read a table; columns of a newer release are left out."""
    rows = _rows(table, [column.name for column in fields(StoredSample)])
    for row in rows:
        row["version_spans"] = tuple(TextSpan(**span) for span in row["version_spans"] or ())
        row["masked_spans"] = tuple(MaskedSpan(**span) for span in row.get("masked_spans") or ())
        row["reward_columns"] = tuple(row.get("reward_columns") or ())
        row["transcript"] = row.get("transcript") or ""
    return [StoredSample(**row) for row in rows]


def _rows(table: pa.Table, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows with those of the columns that the table has; a file of an older release lacks some."""
    rows: list[dict[str, Any]] = table.select([name for name in names if name in table.column_names]).to_pylist(
        maps_as_pydicts="lossy"
    )
    for row in rows:
        row["errors"] = row.get("errors") or {}
    return rows


def plain(sample: StoredSample) -> dict[str, Any]:
    """Make a JSON object of a sample, with one of its row's columns; a number that is not finite becomes null."""
    values = asdict(sample)
    for name in ("reward", "advantage"):
        values[name] = _finite(values[name])
    values["columns"] = _columns(sample)
    values["transcript"] = json.loads(sample.transcript) if sample.transcript else None
    values["reward_parts"] = {part: _finite(score) for part, score in sample.reward_parts.items()}
    return values


def taken_columns(sample: StoredSample) -> dict[str, str]:
    """Return the columns that rewards take, by name: texts as they are, other values as JSON."""
    columns = _columns(sample)
    found = {name: columns[name] for name in sample.reward_columns if name in columns}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def _columns(sample: StoredSample) -> dict[str, Any]:
    columns: dict[str, Any] = json.loads(sample.columns, parse_constant=lambda _: None)
    return columns


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def storable(text: str) -> str:
    """Replace lone surrogates, which a JSON row may have and UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()
