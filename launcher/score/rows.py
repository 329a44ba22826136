"""Reads completions to score: of a file, stored samples, or rows in memory; each row that cannot be used is named."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.rewards.base import ScoredText
from launcher.check.rewards import decoding_of
from servicekit.errors import ConfigError
from tandem_clients.formatting import PromptFormat, PromptText, prompt_format
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import LengthReward, OverlongReward
from tandem_files.rows.messages import prompt_of
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.rows.reading import Row, RowKeys, first_record, read_rows
from tandem_files.rows.values import BadRow, answer_of, column
from tandem_files.tokenizer import TextCodec

COMPLETION = "completion"
# Names of a row that is a stored sample: `tandem samples --json`, or a file of the run's samples/.
_OF_A_SAMPLE = frozenset({"group_id", "sample", "prompt", "completion", "columns", "finish_reason"})


@dataclass(kw_only=True)
class Item:
    """A completion to score, where it is from, and the episode whose last turn it is, as stored; "": of none."""

    place: str
    text: ScoredText
    transcript: str = ""


class CompletionReader:
    """Makes texts to score of rows."""

    def __init__(self, config: RunConfig, column: str) -> None:
        self._config, self._column = config, column
        self._decoding = decoding_of(config)
        self.codec: TextCodec | None = None
        self._formats: PromptFormat | None = None
        self.remarks: list[str] = []
        self.columns: dict[str, None] = {}
        try:
            self.codec = TextCodec.from_folders(config.model.path, config.model.tokenizer_path)
            self._formats = prompt_format(config.data, self.codec)
        except (OSError, ValueError) as error:
            self._without_tokenizer(str(error))

    def _without_tokenizer(self, why: str) -> None:
        lengths = [part.label for part in self._config.reward if isinstance(part, LengthReward | OverlongReward)]
        if self.codec is None and lengths:
            raise ConfigError(f"reward {lengths[0]} needs the tokenizer, for lengths in tokens: {why}")
        what = "prompts are not rendered" if self.codec is not None else "tokens are not counted, prompts not rendered"
        self.remarks.append(f"{what}: {why}")

    def of_file(self, path: Path) -> list[Item]:
        """Read a file. Raises: DataError: of all rows that cannot be used."""
        if not path.is_file():
            raise DataError.of(path, "does not exist, or is no file")
        _, first = first_record(path)
        found = list(read_rows(path, self._keys(first)))
        problems = [row for row in found if isinstance(row, RowProblem)]
        return self._items([row for row in found if isinstance(row, Row)], problems)

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Item]:
        """Take rows. Raises: DataError."""
        place, found, problems = Path("rows"), list[Row](), list[RowProblem]()
        for number, record in enumerate(rows, 1):
            if not isinstance(record, Mapping):
                what = f"is a {type(record).__name__}, not a row: give a list of dicts, or a file"
                raise DataError.of(place, what, number)
            keys = self._keys(record)
            try:
                prompt = "" if keys.prompt is None else prompt_of(record, keys.prompt)
                answer = answer_of(record, keys.answer)
                found.append(Row(file=place, number=number, prompt=prompt, answer=answer, columns=dict(record)))
            except BadRow as error:
                problems.append(RowProblem(file=place, number=number, message=str(error)))
        return self._items(found, problems)

    def _keys(self, record: Mapping[str, Any]) -> RowKeys:
        """Choose the columns of prompt and answer: the configuration's, where a row has them."""
        if record.keys() >= _OF_A_SAMPLE:
            return RowKeys()
        data = self._config.data
        wanted = {"prompt": data.prompt_key, "answer": data.answer_key}
        found = {name: key for name, key in wanted.items() if key is not None and _has(record, key)}
        for name, key in wanted.items():
            if key is not None and name not in found:
                self.remarks.append(f"no column {key!r} (data.{name}_key): rewards get an empty {name}")
        tools = data.tools_key if data.tools_key is not None and _has(record, data.tools_key) else None
        return RowKeys(prompt=found.get("prompt"), answer=found.get("answer"), tools=tools)

    def _items(self, rows: Sequence[Row], problems: list[RowProblem]) -> list[Item]:
        items, group, before = list[Item](), -1, None
        for row in rows:
            try:
                sample = row.columns.keys() >= _OF_A_SAMPLE
                prompt = self._prompt(row, sample=sample)
                transcript = _transcript_of(row.columns) if sample else ""
                texts = [_last_turn(row.columns)] if transcript else _completions(row.columns, self._column)
                columns = _columns_of_sample(row.columns) if sample else row.columns
            except BadRow as error:
                problems.append(row.problem(str(error)))
                continue
            # Completions of a prompt that follow each other are its group.
            key = row.columns["group_id"] if sample else (prompt.text, row.answer)
            group, before = (group + (key != before or len(texts) > 1), key)
            self.columns |= dict.fromkeys(columns)
            for index, text in enumerate(texts):
                item = replace(self._text(text, row, prompt), columns=columns, group=group)
                if transcript and isinstance(num_tokens := row.columns.get("num_tokens"), int):
                    masked = row.columns.get("masked_spans") or ()
                    item.num_tokens = num_tokens - sum(span["end"] - span["start"] for span in masked)
                item.sample_id = f"score.g{group}.row{row.number}#{index}"
                items.append(Item(place=f"{row.file.name}:{row.number}#{index}", text=item, transcript=transcript))
        if problems or not items:
            raise DataError(problems or [RowProblem(file=Path("rows"), number=None, message="has no completions")])
        return items

    def _prompt(self, row: Row, *, sample: bool) -> PromptText:
        """Return the prompt as the policy gets it. Raises: BadRow."""
        if sample or not row.prompt or self._formats is None:
            text = row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1].get("content") or "")
            messages = None if isinstance(row.prompt, str) else row.prompt
            return PromptText(text=text, rendered=False, messages=messages)
        return self._formats.text(row)

    def _text(self, completion: str, row: Row, prompt: PromptText) -> ScoredText:
        truncated = row.columns.get("finish_reason") == "length" or row.columns.get("truncated") is True
        ids: list[int] = []
        if self.codec is not None:
            (ids,) = self.codec.encode_rendered([completion])
            ends = bool(ids) and ids[-1] in self.codec.stop_token_ids
            completion = self.codec.as_written(completion, **self._decoding)
            ids = [*ids, *([] if ends or truncated else self.codec.stop_token_ids[:1])]
        return ScoredText(
            completion=completion,
            answer=row.answer,
            truncated=truncated,
            num_tokens=len(ids),
            prompt=prompt.text,
            messages=prompt.messages,
            completion_ids=ids,
        )


def _has(record: Mapping[str, Any], key: str) -> bool:
    try:
        column(record, key, "")
    except BadRow:
        return False
    return True


def _completions(record: Mapping[str, Any], name: str) -> list[str]:
    """Return the completions of a row. Raises: BadRow: there is none, or it is no text."""
    if name == COMPLETION and COMPLETION not in record and "completions" in record:
        name = "completions"
    value = column(record, name, "--column")
    several = isinstance(value, list) and not (value and isinstance(value[0], Mapping))
    found = [_text_of(one) for one in (value if several else [value])]
    if not found or any(one is None for one in found):
        raise BadRow(f"{name!r} is {value!r:.60}; it must be a text, messages, or a list of texts")
    return [one for one in found if one is not None]


def _transcript_of(record: Mapping[str, Any]) -> str:
    """Return the episode of a stored sample as JSON, as Parquet has it; "": there is none."""
    said = record.get("transcript") or ""
    return said if isinstance(said, str) else json.dumps(said)


def _last_turn(record: Mapping[str, Any]) -> str:
    """Return the text that rewards read of a stored episode: what follows the environment's last answer."""
    spans = record.get("masked_spans") or [{"text_end": 0}]
    text: str = record[COMPLETION][spans[-1]["text_end"] :]
    return text


def _text_of(value: Any) -> str | None:
    """Return a completion's text; of messages that of the last one."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def _columns_of_sample(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data's columns that a stored sample has. Raises: BadRow."""
    value = record["columns"]
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"'columns' is no JSON: {error}") from error
    return dict(value or {})
