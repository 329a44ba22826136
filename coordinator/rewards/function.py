"""A user's own function as a reward, in worker processes (workers/own_code.py calls it)."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from coordinator.rewards.base import Reward, ScoredText, Scores, TakenColumns, parts_of
from coordinator.workers.own_code import read_source
from coordinator.workers.pool import RewardWorkers
from coordinator.workers.signature import ITERATION, unfilled
from coordinator.workers.task import Answer, Task
from coordinator.workers.tasks import FUNCTION
from servicekit.logs import get_logger
from tandem_config.sections.reward import FunctionReward, split_reference

BATCH_SIZE, CONCURRENCY = 128, 16
# In a small batch at least this many failures before the rest is not tried.
_FEW = 2

log = get_logger(__name__)

# How a value of a sample is got; the names are those of signature.PLURALS.
VALUES: Mapping[str, Callable[[ScoredText], Any]] = {
    "prompt": lambda item: item.prompt,
    "completion": lambda item: item.completion,
    "answer": lambda item: item.answer,
    "columns": lambda item: dict(item.columns),
    "num_tokens": lambda item: item.num_tokens,
    "truncated": lambda item: item.truncated,
    "finish_reason": lambda item: "length" if item.truncated else "stop",
    "sample_id": lambda item: item.sample_id,
    "prompt_ids": lambda item: list(item.prompt_ids),
    "completion_ids": lambda item: list(item.completion_ids),
}
# With `completions: messages`.
_AS_MESSAGES: Mapping[str, Callable[[ScoredText], Any]] = {
    "prompt": lambda item: list(item.messages or [{"role": "user", "content": item.prompt}]),
    "completion": lambda item: [{"role": "assistant", "content": item.completion}],
}
_ITERATION_OF_SAMPLE = re.compile(r"i(\d+)\.")


def task_of(section: FunctionReward, *, output: bool) -> Task:
    """Describe what the workers of a function do, with its source as it is now, which later ones get as well.

    Args:
        output: whether what it prints is logged.
    """
    place, function = split_reference(section.function)
    return Task(
        name=FUNCTION,
        settings={
            "place": place,
            "function": function,
            "per": section.per,
            "args": dict(section.args),
            "source": read_source(place),
        },
        timeout_s=section.timeout_s,
        wall_clock=True,
        start_timeout_s=section.start_timeout_s,
        memory_mib=section.memory_mib,
        concurrency=section.concurrency or CONCURRENCY,
        output=section.label if output else "",
    )


def check_form(section: FunctionReward, form: Mapping[str, Any], columns: Sequence[str] | None) -> None:
    """Compare a function's signature with the settings and the data.

    Args:
        form: Work.form of its code.
        columns: the columns that rows of the data have; None: not known, so not compared.
    Raises: ValueError: a parameter that nothing fills, or a setting that does nothing.
    """
    complaint = "" if columns is None else unfilled(form["required"], columns, form["per"])
    if complaint:
        raise ValueError(f"{section.function} {complaint}")
    if section.concurrency is not None and not form["is_async"]:
        raise ValueError(f"concurrency does nothing, because {section.function} is not `async def`: leave it out")
    if section.batch_size is not None and form["per"] != "batch":
        raise ValueError(f"batch_size does nothing, because {section.function} scores one {form['per']}: leave it out")


class OwnFunction(Reward):
    """Calls a user's function for each sample, for batches of them, or for the groups.

    Args:
        section: its settings.
        output: whether what it prints is logged.
    """

    def __init__(self, section: FunctionReward, *, output: bool = True) -> None:
        self._section = section
        self._task = task_of(section, output=output)
        self._workers: RewardWorkers | None = None
        self._form: Mapping[str, Any] = {}
        self._values = {**VALUES, **_AS_MESSAGES} if section.completions == "messages" else VALUES
        # The newest of those whose samples were scored: evaluations have none of their own.
        self._iteration = 0

    @property
    def assumed(self) -> Sequence[str]:
        """Return the parameters with names of other trainers and without a default, once it is started."""
        return list(self._form["assumed"])

    @property
    def per(self) -> str:
        """What a call scores, once it is started: "sample", "batch" or "group"."""
        return str(self._form["per"])

    @property
    def takes(self) -> TakenColumns:
        """Return its parameters that columns fill."""
        if not self._form:
            return TakenColumns()
        return TakenColumns(
            required=tuple(self._form["required"]),
            optional=tuple(self._form["optional"]),
            everything=self._form["everything"] or "columns" in self._form["values"],
        )

    async def start(self, columns: Sequence[str] | None) -> None:
        """Import the function in all workers and compare its parameters with the columns; None: they are not known."""
        self._workers = RewardWorkers(self._task, count=self._section.workers)
        self._form = await self._workers.start()
        check_form(self._section, self._form, columns)
        # A batch is a lot of work: a worker holds one that it does, and the next.
        window = Task.window if self._form["per"] == "sample" else 2
        concurrency = self._task.concurrency if self._form["is_async"] else 1
        self._workers.tune(window=2 * concurrency if self._form["is_async"] else window, concurrency=concurrency)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        assert self._workers is not None, "score() before start()"
        calls = self._calls(items)
        samples = [self._sample(item) for item in items]
        single = self._form["per"] == "sample"
        jobs = samples if single else [[samples[place] for place in call] for call in calls]
        budget = max(_FEW, int(self._section.max_error_share * len(jobs)))
        answers = await self._workers.map(jobs, give_up_after=0 if self._section.on_error == "stop" else budget)
        values, errors, parts = [0.0] * len(items), dict[int, str](), dict[int, Mapping[str, float]]()
        absent, seconds = set[int](), dict[int, float]()
        for call, answer in zip(calls, answers, strict=True):
            scores = [0.0] * len(call) if answer.failed else [answer.value] if single else answer.value
            for place, value in zip(call, scores, strict=True):
                score, parts[place] = value if isinstance(value, list) else (value, {})
                values[place], seconds[place] = score or 0.0, answer.seconds
                if score is None:
                    absent.add(place)
                if answer.failed:
                    errors[place] = self._why(answer)
        found = parts_of(parts, len(items))
        return Scores(values=values, errors=errors, absent=frozenset(absent), parts=found, seconds=seconds)

    async def close(self) -> None:
        """End the worker processes, busy ones too."""
        if self._workers is not None:
            await self._workers.close()

    def _calls(self, items: Sequence[ScoredText]) -> list[list[int]]:
        """Return the places of the samples of each call."""
        places = range(len(items))
        if self._form["per"] == "sample":
            return [[place] for place in places]
        if self._form["per"] == "group":
            return [list(group) for _, group in groupby(places, key=lambda place: items[place].group)]
        # Equal shares for all workers, if they are smaller than a batch may be.
        share = -(-len(items) // self._section.workers)
        size = min(self._section.batch_size or BATCH_SIZE, max(1, share))
        return [list(places[start : start + size]) for start in range(0, len(items), size)]

    def _sample(self, item: ScoredText) -> dict[str, Any]:
        """Return the values that the function takes; columns that it does not name are not sent."""
        form = self._form
        if found := _ITERATION_OF_SAMPLE.match(item.sample_id):
            self._iteration = int(found[1])
        sample = {name: self._values[name](item) for name in form["values"] if name != ITERATION}
        if ITERATION in form["values"]:
            sample[ITERATION] = self._iteration
        names = [*form["required"], *form["optional"]]
        if "columns" not in sample and names:
            sample["columns"] = {name: item.columns[name] for name in names if name in item.columns}
        return sample

    def _why(self, answer: Answer) -> str:
        if answer.late:
            return f"it took longer than timeout_s = {self._section.timeout_s:g} s"
        return answer.error or "it was not tried, because too many before it had failed"
