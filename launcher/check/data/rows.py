"""Checks the data files, all rows in one pass."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from coordinator.data.repeated_prompts import Repeats, copy_warnings, texts_of
from coordinator.data.scan import Scan, Scanner
from coordinator.data.scan_cache import Indexer, RowIndex
from coordinator.data.sources import RowSource, find_sources
from launcher.check.data.answers import AnswerSample, check_answers
from launcher.check.data.columns import TemplateColumns
from launcher.check.data.lengths import LIMITS, check_lengths, check_limits, check_set
from launcher.check.data.template import PlainPrompts, check_arguments, check_turns, turn_lines
from tandem_clients.flow import DataKey
from tandem_clients.formatting import EpisodeTools, PromptFormat, PromptText, prompt_format
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_files.rows.problems import DataError
from tandem_files.rows.reading import Row
from tandem_files.tokenizer import TextCodec
from weightsync.model.spec import ModelSpec

_PARTS: tuple[DataKey, ...] = ("train", "heldout")
_COLUMNS = ("data.prompt_key", "data.answer_key", "data.tools_key", "data.system_key")
_FORMAT = ("data.prompt_as", "data.chat_template", "data.system_prompt", "data.chat_template_kwargs")
_SET_LIMITS = ("grpo.max_new_tokens", "rollout.max_total_tokens", "rollout.context_length")
# Prompts whose ends are kept, and their characters.
_ENDS, _END_CHARS = 32, 200
_LENGTHS = ("data.max_prompt_tokens", "data.overlong_prompts")


@dataclass(kw_only=True)
class CheckedData:
    """What was found in the data.

    Attributes:
        train: the passes over the sources of data.train, if all rows can be used.
        formats: which rendered and tokenized them.
        scans: the passes over all sources, by the key that names them.
        first: the first row that can be used, of data.train if it has one, and its prompt.
        with_turns: the first row whose messages are rendered with tools, or for an environment.
        episodes: what the environment changes in prompts; None: there is none.
        codec: the tokenizer, if it can be used.
        indices: where the rows lie, for the coordinator.
        ends: the ends of the first prompts.
        notes: lines about the data that are no problems.
        answers: of data.train.
    """

    problems: list[ConfigProblem] = field(default_factory=list)
    train: list[Scan] = field(default_factory=list)
    formats: PromptFormat | None = None
    scans: dict[str, list[Scan]] = field(default_factory=dict)
    codec: TextCodec | None = None
    first: tuple[Row, PromptText] | None = None
    with_turns: Row | None = None
    episodes: EpisodeTools | None = None
    indices: list[RowIndex] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: AnswerSample | None = None

    def keep_first(self, batch: Sequence[tuple[Row, PromptText]]) -> None:
        """Keep the first row of all, those of data.train being read first, and the ends of the first prompts."""
        self.ends += [text.text[-_END_CHARS:] for _, text in batch[: _ENDS - len(self.ends)]]
        if self.first is None and batch:
            self.first = batch[0]
        if self.with_turns is None:
            several = [row for row, text in batch if text.rendered and (row.tools or self.episodes is not None)]
            self.with_turns = next(iter(several), None)


def check_data(
    config: RunConfig,
    usable: Callable[..., bool],
    spec: ModelSpec | None,
    codec: TextCodec | None,
    episodes: EpisodeTools | None = None,
) -> CheckedData:
    """Check the rows of the training and held-out data, their answers, chat template and lengths.

    Args:
        usable: whether all of the given keys have valid values.
        spec: the model, for its position limit; None: not checked.
        codec: the tokenizer, for chat template and lengths in tokens; None: not checked.
        episodes: None: there is no environment, or it cannot be loaded.
    """
    found = CheckedData(codec=codec, episodes=episodes)
    if codec is not None and usable(*_FORMAT, *_LENGTHS, "model.path", "model.tokenizer_path"):
        try:
            found.formats = prompt_format(config.data, codec, episodes)
        except (OSError, ValueError) as error:
            text = str(error).removeprefix(f"data.chat_template = {config.data.chat_template}: ")
            found.problems.append(problem("data.chat_template", config.data.chat_template, text))
    read_answers = usable("reward")
    longest = 0
    for part in _PARTS:
        if getattr(config.data, part) is None or not usable(f"data.{part}", *_COLUMNS):
            continue
        scans, problems = _check_part(config, part, found, read_answers=read_answers)
        found.problems += problems
        found.scans[f"data.{part}"] = scans
        longest = max([longest, *(scan.longest for scan in scans)])
        if part == "train" and usable("grpo.prompts_per_iteration", "schedule"):
            found.train = [] if any(scan.faults.problems for scan in scans) else scans
            found.problems += _check_enough(config, scans)
    if usable("evaluation.sets", *_SET_LIMITS, *_COLUMNS):
        for sampled in config.evaluation.sets:
            found.problems += _check_set(config, sampled, found, spec, read_answers=read_answers)
    if found.formats is not None:
        found.problems += check_arguments(config, found.formats)
        found.problems += check_turns(found.formats) if episodes is not None else ()
        history = None if config.environment is None else config.environment.history
        found.notes += turn_lines(found.formats, found.with_turns, history)
    if usable(*LIMITS):
        found.problems += check_limits(config, spec, longest)
    return found


def _check_part(
    config: RunConfig, part: DataKey, found: CheckedData, *, read_answers: bool
) -> tuple[list[Scan], list[ConfigProblem]]:
    """Read all rows of a part. Returns: what was found in each source, and the problems; `found` gets the rest."""
    key = f"data.{part}"
    answers = AnswerSample(prompt_key=config.data.prompt_key)
    found.answers = found.answers or answers
    formats = found.formats
    watching: list[PlainPrompts | TemplateColumns] = []
    if formats is not None:
        watching = [PlainPrompts(config, formats), TemplateColumns(config, formats)]
    scanner = Scanner(
        format=found.formats,
        max_tokens=config.data.max_prompt_tokens,
        watchers=[found.keep_first, answers.add, *(watcher.add for watcher in watching)],
        report=lambda file, share: print(f"reading {file}: {share:.0%}", file=sys.stderr),
    )
    try:
        sources = find_sources(config.data, part)
        scans = [_scan(config, scanner, source, found.indices) for source in sources]
    except DataError as error:
        return [], [problem(key, found.place, found.text) for found in error.problems]
    except OSError as error:
        return [], [problem(key, error.filename, f"cannot be read: {error.strerror}")]
    problems = [problem for scan in scans for problem in _problems(key, scan)]
    if read_answers:
        problems += check_answers(config, answers, key=key)
    for watcher in watching:
        problems += watcher.problems(key)
    for scan in scans:
        problems += check_lengths(config, scan, key=key)
    problems += _check_overlap(config, part, sources)
    if not any(scan.faults.problems for scan in scans):
        problems += _check_copies(config, key, scans, found.scans.get("data.train", scans))
    return scans, problems


def _scan(config: RunConfig, scanner: Scanner, source: RowSource, indices: list[RowIndex]) -> Scan:
    if scanner.format is None:
        return scanner.scan(source)
    indexer = Indexer(config.data, source, scanner.format)
    scan = replace(scanner, keep=indexer.add).scan(source)
    index = indexer.index(scan)
    indices += [] if index is None else [index]
    return scan


def _check_set(
    config: RunConfig,
    sampled: EvaluationSet,
    found: CheckedData,
    spec: ModelSpec | None,
    *,
    read_answers: bool,
) -> list[ConfigProblem]:
    """Check the data of an evaluation set as data.heldout is checked, and that its completions fit."""
    own = config.changed("data", heldout=sampled.data)
    scans, problems = _check_part(own, "heldout", found, read_answers=read_answers)
    found.scans.setdefault("evaluation.sets", []).extend(scans)
    renamed = [replace(problem, key="evaluation.sets") for problem in problems]
    return [*renamed, *check_set(config, sampled, spec, max((scan.longest for scan in scans), default=0))]


def _problems(key: str, scan: Scan) -> Iterator[ConfigProblem]:
    yield from (problem(key, found.place, found.text) for found in scan.faults.problems)
    if scan.faults.num_more:
        file = scan.source.files[0].path
        yield problem(key, file, f"{scan.faults.num_more} more rows with problems")


def _check_overlap(config: RunConfig, part: DataKey, sources: Sequence[RowSource]) -> list[ConfigProblem]:
    """Warn of held-out files that are trained on, where a glob hides it."""
    if part != "heldout":
        return []
    try:
        train = find_sources(config.data, "train")
    except DataError:
        return []  # reported already
    trained = {file.path.resolve() for source in train for file in source.files}
    both = [file.path for source in sources for file in source.files if file.path.resolve() in trained]
    said = {source.path for source in config.data.train} & {source.path for source in config.data.heldout or ()}
    if not both or said:
        return []  # the configuration itself shows it: tandem_config/checks/data.py
    return [
        problem(
            "data.heldout",
            both[0],
            f"is a training file too (of {len(both)} such), so the held-out accuracy will measure memorization",
            "use rows that are not trained on",
            severity="warning",
        )
    ]


def _check_copies(config: RunConfig, key: str, scans: Sequence[Scan], train: Sequence[Scan]) -> Iterator[ConfigProblem]:
    """Warn of prompts that are repeated, and of held-out ones that are trained on; files that are both are reported."""
    trained = {file.path.resolve() for scan in train for file in scan.source.files}
    is_same = scans is not train and any(file.path.resolve() in trained for s in scans for file in s.source.files)
    # In `tandem evaluate`, data.train is one of the sets.
    others = [] if is_same or config.rollout.serve_model else train
    file = str(scans[0].source.files[0].path)
    for warning, advice in copy_warnings(scans, scans if scans is train else others):
        yield problem(key, file, warning, advice, severity="warning")


def _check_enough(config: RunConfig, scans: Sequence[Scan]) -> Iterator[ConfigProblem]:
    wanted = config.grpo.prompts_per_iteration
    texts = texts_of(scan for scan in scans if not scan.faults.problems)
    rows = Repeats.of(texts).num_different if len(texts) else sum(scan.num_rows for scan in scans)
    ahead = wanted * config.schedule.batches_ahead
    if 0 < rows < wanted:
        why = f"data.train has only {rows} different prompts, so an iteration sees some prompts more than once"
        yield problem("grpo.prompts_per_iteration", wanted, why, f"{rows} or fewer", severity="warning")
    elif 0 < rows < wanted + ahead:
        yield problem(
            "grpo.prompts_per_iteration",
            wanted,
            f"data.train has only {rows} different prompts, and with schedule.kind: {config.schedule.kind} "
            f"{wanted + ahead} groups are under way: a prompt begins again before its last group is trained",
            f"{max(1, rows * wanted // (wanted + ahead))} or fewer, or more rows",
            severity="warning",
        )
