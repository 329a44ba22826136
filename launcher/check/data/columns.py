"""Names the columns that are not used, and warns of those that the chat template would write."""

from collections.abc import Iterator, Mapping, Sequence

from coordinator.data.scan import Scan
from coordinator.rewards.base import TakenColumns
from tandem_clients.formatting import PromptFormat, PromptText
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.rows.reading import Row

# Usual names of what only a chat template writes.
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools",)
# Columns that data have for the policy, not for bookkeeping: they are named first.
_FOR_THE_POLICY = (*TOOLS, *SYSTEMS, "functions", "choices", "options", "context", "passage", "documents", "input",
                   "image", "images", "hint", "tests", "test_cases")  # fmt: skip
_NAMED = 10


class TemplateColumns:
    """Counts rows with tools or a system prompt in a column that no setting names, though the template writes such."""

    def __init__(self, config: RunConfig, formats: PromptFormat) -> None:
        takes_tools = any(template.takes_tools for template in formats.templates.values())
        self._columns = {name: "data.tools_key" for name in TOOLS if config.data.tools_key is None and takes_tools}
        if config.data.system_key is None and config.data.system_prompt is None:
            self._columns |= dict.fromkeys(SYSTEMS, "data.system_key")
        self._found: dict[str, list[str]] = {}
        self._num_rows = 0

    def add(self, batch: Sequence[tuple[Row, PromptText]]) -> None:
        """Look at rows that can be used."""
        self._num_rows += len(batch)
        for name in self._columns:
            self._found.setdefault(name, []).extend(
                f"{row.file}:{row.number}" for row, text in batch if text.rendered and self._has(row, name)
            )

    def _has(self, row: Row, name: str) -> bool:
        value = row.columns.get(name)
        if name in TOOLS:
            return row.tools is None and isinstance(value, (list, str)) and bool(value) and value != "[]"
        has_own = row.system is not None or (isinstance(row.prompt, list) and row.prompt[0]["role"] == "system")
        return not has_own and isinstance(value, str) and bool(value.strip())

    def problems(self, key: str) -> Iterator[ConfigProblem]:
        """Warn if there were any. key: the part's key in the configuration."""
        for name, places in self._found.items():
            if places:
                setting = self._columns[name]
                yield problem(
                    key,
                    places[0],
                    f"the column {name!r}, which {len(places)} of {self._num_rows} rows have, is not used: the "
                    "policy does not see what is in it",
                    f"set {setting}: {name}, and the chat template writes it",
                    severity="warning",
                )


def unused_columns(scans: Sequence[Scan], first: Row | None, taken: Sequence[TakenColumns]) -> list[str]:
    """Return the columns, and fields of columns that are read in part, that no setting and no reward reads.

    Args:
        first: a row, whose fields within columns are looked at.
        taken: what the rewards take.
    """
    if any(takes.everything for takes in taken):
        return []
    named = {name for takes in taken for name in (*takes.required, *takes.optional)}
    found: dict[str, None] = {}
    for scan in scans:
        for file in scan.source.files:
            columns = scan.by_file[file.path].lacking if file.path in scan.by_file else {}
            keys = (file.keys.prompt, file.keys.answer, file.keys.tools, file.keys.system)
            read = named.union(key for key in keys if key is not None)
            found |= dict.fromkeys(_unread(columns, read, {} if first is None else first.columns))
    likely = [name for name in _FOR_THE_POLICY if name in found]
    return [*likely, *(name for name in found if name not in likely)]


def unused_line(unused: Sequence[str]) -> list[str]:
    """Return the line that names them; [] if there are none."""
    if not unused:
        return []
    more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
    return [f"not used: {', '.join(unused[:_NAMED])}{more} (columns that no data.*_key names and no reward takes)"]


def _unread(columns: Mapping[str, object], read: set[str], row: Mapping[str, object]) -> Iterator[str]:
    for name in columns:
        within = {key for key in read if key.startswith(f"{name}.") and key not in columns}
        if name not in read and not within:
            yield name
        elif name not in read:
            fields = row.get(name)
            inner = fields if isinstance(fields, Mapping) else {}
            # A longer key leads further into a field.
            yield from (
                f"{name}.{field}" for field in inner
                if not any(f"{key}.".startswith(f"{name}.{field}.") for key in within)
            )  # fmt: skip
