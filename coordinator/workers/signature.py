"""Runs in a reward worker: which parameters of a user's function get what.

| name                                   | value                                                                 |
|----------------------------------------|-----------------------------------------------------------------------|
| `prompt`, `completion`, `answer`       | texts                                                                 |
| `columns`                              | all columns of the data's row, a dict                                 |
| `num_tokens`                           | tokens of the completion                                              |
| `truncated`, `finish_reason`           | whether the length limit cut it off; "length" or "stop"               |
| `sample_id`                            | as in errors and logs: i12.g3.row77#5                                 |
| `prompt_ids`, `completion_ids`         | token ids, for a parameter of that name                               |
| a name in `args` of the configuration  | its value                                                             |
| the name of a column                   | the row's value                                                       |

For a batch or a group each of them is a list, and the names are plural: `prompts`, `completions`, `answers`,
`finish_reasons`, `sample_ids`; the others keep theirs.

Names of other trainers get, where neither a column nor `args` has the name:

| name                                   | value                                                                 |
|----------------------------------------|-----------------------------------------------------------------------|
| `solution_str` (verl)                  | the completion                                                        |
| `ground_truth` (verl, TRL)             | the column `reward_model.ground_truth`, else the answer               |
| `extra_info`, `data_source` (verl)     | the parameter's default, else {} and None                             |
| `answer` of a batch (TRL)              | the answers                                                           |
| `trainer_state` (TRL)                  | an object with `global_step`, the iteration                           |
| `log_extra`, `log_metric` (TRL)        | functions: numbers that are given to them become parts of the scores  |

Of a batch they are lists, those of verl also under its names `solution_strs`, `ground_truths`, ...
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

# Name of a value for one sample -> the name of the list of them.
PLURALS = {
    "prompt": "prompts",
    "completion": "completions",
    "answer": "answers",
    "columns": "columns",
    "num_tokens": "num_tokens",
    "truncated": "truncated",
    "finish_reason": "finish_reasons",
    "sample_id": "sample_ids",
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
}
# Large, so that only a parameter of the name gets them.
_BY_NAME_ONLY = ("prompt_ids", "completion_ids")
# verl's names of a batch.
_VERLS = {
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
    "data_sources": "data_source",
}
# Names of other trainers -> the value of a sample that they need.
_BORROWED = {"solution_str": "completion", "ground_truth": "answer", "extra_info": "", "data_source": ""}
_BORROWED_BY_BATCHES = _BORROWED | {"answer": "answer"} | {many: _BORROWED[one] for many, one in _VERLS.items()}
# What TRL gives to every function of a batch besides the samples.
ITERATION = "iteration"
_OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric")
# Names that other trainers give to these values, for the message.
_ELSEWHERE = {
    "prompt_str": "prompt",
    "response": "completion",
    "responses": "completions",
    "solution": "answer",
    "solutions": "answers",
    "label": "answer",
    "labels": "answers",
    "sample": "columns",
}
# Names that other trainers fill and that nothing stands for here.
_NOT_HERE = ("completions_ids", "environments", "reward_router_address", "reward_model_tokenizer")


class Unfit(ValueError):
    """A user's function cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How a function is called.

    Attributes:
        per: "sample", "batch" or "group".
        values: names for one sample, in PLURALS, that it takes.
        required: further parameters without a default: columns of the row.
        optional: further parameters with one.
        everything: whether it takes any name (`**kwargs`).
        args: values from the configuration, which it takes by name.
        borrowed: names of other trainers, and whether a default may stand for it.
        of_the_trainer: those of _OF_THE_TRAINER that it takes.
    """

    per: str
    values: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    args: Mapping[str, Any]
    borrowed: Mapping[str, bool] = field(default_factory=dict)
    of_the_trainer: tuple[str, ...] = ()

    @property
    def sent(self) -> list[str]:
        """The names of the values of each sample that a call needs."""
        needed = [_BORROWED_BY_BATCHES[name] for name in self.borrowed]
        states = [ITERATION] if self.of_the_trainer else []
        return list(dict.fromkeys([*self.values, *filter(None, needed), *states]))

    @property
    def lent(self) -> list[str]:
        """The columns in which values of borrowed names may be."""
        names = [_VERLS.get(name, name) for name in self.borrowed]
        return [*names, "reward_model"] if "ground_truth" in names else names

    def arguments(self, sample: Mapping[str, Any], logged: "LoggedParts | None" = None) -> dict[str, Any]:
        """Return the arguments of a call for one sample. Raises: KeyError: its row lacks a column.

        Args:
            logged: collects what the function logs.
        """
        columns = sample.get("columns", {})
        borrowed = {name: _lent(name, sample) for name in self.borrowed}
        found = {
            **{name: value for name, value in borrowed.items() if value is not _NOTHING},
            **{name: columns[name] for name in self._wanted(columns) if name in columns},
        }
        _demand(self.required, found)
        filled = {name: _FILLINGS[name] for name, optional in self.borrowed.items() if not optional}
        own = {name: sample[name] for name in self.values}
        return {**filled, **found, **self._of_the_trainer([sample], logged), **self.args, **own}

    def arguments_of_all(
        self, samples: Sequence[Mapping[str, Any]], logged: "LoggedParts | None" = None
    ) -> dict[str, Any]:
        """Return the arguments of a call for several samples: lists; None where a row lacks a column.

        Raises: KeyError: every row lacks a column.
        """
        rows = [sample.get("columns", {}) for sample in samples]
        present = dict.fromkeys(name for row in rows for name in row)
        found = {name: [row.get(name) for row in rows] for name in self._wanted(present) if name in present}
        _demand(self.required, found)
        values = {PLURALS[name]: [sample[name] for sample in samples] for name in self.values}
        lent = {name: self._lent_to_all(name, samples) for name in self.borrowed}
        borrowed = {name: of_all for name, of_all in lent.items() if of_all}
        return {**found, **borrowed, **self._of_the_trainer(samples, logged), **self.args, **values}

    def _lent_to_all(self, name: str, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the values of a borrowed name; empty: its default stands for them."""
        one = _VERLS.get(name, name)
        found = [_lent(one, sample) for sample in samples]
        if self.borrowed[name] and all(value is _NOTHING for value in found):
            return []
        return [_FILLINGS[one] if value is _NOTHING else value for value in found]

    def _of_the_trainer(self, samples: Sequence[Mapping[str, Any]], logged: "LoggedParts | None") -> dict[str, Any]:
        if not self.of_the_trainer:
            return {}
        logged = LoggedParts() if logged is None else logged
        state = SimpleNamespace(global_step=max(sample[ITERATION] for sample in samples))
        known = {"trainer_state": state, "log_extra": logged.log_extra, "log_metric": logged.log_metric}
        return {name: known[name] for name in self.of_the_trainer}

    def _wanted(self, columns: Mapping[str, Any]) -> Sequence[str]:
        return list(columns) if self.everything else [*self.required, *self.optional]


# No value; what an argument without a default gets then.
_NOTHING: Any = object()
_FILLINGS: dict[str, Any] = {
    "extra_info": {},
    "data_source": None,
    "solution_str": "",
    "ground_truth": "",
    "answer": "",
}


def _lent(name: str, sample: Mapping[str, Any]) -> Any:
    """Return what a sample has for a name of other trainers; _NOTHING: it has nothing."""
    columns = sample.get("columns", {})
    if name in columns:
        return columns[name]
    nested = columns.get("reward_model") if name == "ground_truth" else None
    if isinstance(nested, Mapping) and name in nested:
        return nested[name]
    return sample.get(_BORROWED_BY_BATCHES[name], _NOTHING)


class LoggedParts:
    """What a function has given to TRL's `log_extra` and `log_metric`: parts of the scores of a call's samples."""

    def __init__(self) -> None:
        self._of_samples: dict[str, Sequence[Any]] = {}
        self._of_all: dict[str, Any] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Take a value of each sample; those that are no numbers are left out."""
        self._of_samples[column] = list(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Take a value of all samples."""
        self._of_all[name] = value

    def parts(self, place: int) -> dict[str, Any]:
        """Return the values of a sample."""
        extra = {name: values[place] for name, values in self._of_samples.items() if place < len(values)}
        return {**self._of_all, **extra}


def _demand(required: Sequence[str], found: Mapping[str, Any]) -> None:
    missing = [name for name in required if name not in found]
    if missing:
        raise KeyError(f"the row has no column {missing[0]!r}")


def read_signature(function: Callable[..., Any], *, per: str | None, args: Mapping[str, Any]) -> Signature:
    """Find out how to call a user's function.

    Args:
        per: what the configuration says; None: the names of the parameters say it.
        args: the configuration's `args`.
    Raises: Unfit: it has parameters that nothing fills, or `args` that it does not take.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise Unfit(f"has no signature that Python can read: {error}") from error
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise Unfit("has parameters that cannot be given by name: remove the '/' from its signature")
    per = per or _guess(named)
    names = {plural if per != "sample" else name: name for name, plural in PLURALS.items()}
    _check_args(named, names, args, everything=everything)
    known = _BORROWED if per == "sample" else _BORROWED_BY_BATCHES
    _check_number(named, {**names, **known}, per)
    borrowed = [parameter for name, parameter in named.items() if name in known and name not in (*names, *args)]
    all_of_them = everything and per != "sample"
    others = [name for name in _OF_THE_TRAINER if name not in args and (all_of_them or name in named)]
    further = [parameter for name, parameter in named.items() if name not in (*names, *args, *known, *_OF_THE_TRAINER)]
    values = [names[name] for name in names if name in named or (everything and name not in _BY_NAME_ONLY)]
    return Signature(
        per=per,
        values=tuple(values),
        borrowed={parameter.name: parameter.default is not parameter.empty for parameter in borrowed},
        of_the_trainer=tuple(others),
        required=tuple(parameter.name for parameter in further if parameter.default is parameter.empty),
        optional=tuple(parameter.name for parameter in further if parameter.default is not parameter.empty),
        everything=everything,
        args={name: value for name, value in args.items() if everything or name in named},
    )


def _guess(named: Mapping[str, Any]) -> str:
    """Return "batch" if a parameter has the name of a list, else "sample"."""
    if any(name in _VERLS for name in named):
        return "batch"
    plurals = [name for name in named if name in PLURALS.values() and name not in PLURALS]
    singulars = [name for name in named if name in PLURALS and name not in (*PLURALS.values(), "answer")]
    if plurals and singulars:
        raise Unfit(
            f"takes {_quoted(plurals)}, lists of a batch, and {_quoted(singulars)}, of one sample: for a batch write "
            f"{_quoted([PLURALS[name] for name in singulars])} instead of the latter, for one sample "
            f"{_quoted([_singular(name) for name in plurals])} instead of the former. Names that can be used: for a "
            f"batch {', '.join(PLURALS.values())}; for one sample {', '.join(PLURALS)}; the data's columns"
        )
    return "batch" if plurals else "sample"


def _check_args(
    named: Mapping[str, Any], names: Mapping[str, str], args: Mapping[str, Any], *, everything: bool
) -> None:
    for name in args:
        if name in names:
            raise Unfit(f"args.{name}: this name is the sample's own; give the value another one")
        if name not in named and not everything:
            raise Unfit(f"args.{name}: it takes no such parameter{_close(name, named)}")


def _check_number(named: Mapping[str, Any], names: Mapping[str, str], per: str) -> None:
    """Refuse names of the other form: `completion` for a batch, `completions` for a sample."""
    for name in named:
        if name not in names and name in (*PLURALS, *PLURALS.values()):
            right = PLURALS.get(name) or _singular(name)
            raise Unfit(f"takes {name!r}, which it cannot with per: {per}: call it {right!r}")


def unfilled(required: Sequence[str], columns: Sequence[str], per: str) -> str:
    """Return the complaint about the parameters that no column fills; "" if there are none.

    >>> unfilled(["response", "level", "hint"], ["prompt", "level"], "sample")
    "takes 'response', 'hint', which nothing fills ('response' is called 'completion' here). Names that can be used: \
prompt, completion, answer, columns, num_tokens, truncated, finish_reason, sample_id, prompt_ids, completion_ids; the \
data's columns: prompt, level; those in args"
    """
    missing = [name for name in required if name not in columns]
    if not missing:
        return ""
    known = list(PLURALS) if per == "sample" else list(PLURALS.values())
    hints = [hint for name in missing if (hint := _hint(name, known, columns))]
    said = f" ({'; '.join(hints)})" if hints else ""
    return (
        f"takes {_quoted(missing)}, which nothing fills{said}. Names that can be "
        f"used: {', '.join(known)}; the data's columns: {', '.join(columns) or 'none'}; those in args"
    )


def _hint(name: str, known: Sequence[str], columns: Sequence[str]) -> str:
    """Return what to write instead of a name; "" if nothing is like it."""
    if name in _NOT_HERE:
        return f"{name!r} is a name of other trainers, without a value here: leave it out"
    here = _ELSEWHERE.get(name, "")
    if here:
        return f"{name!r} is called {here if here in known else PLURALS.get(here, here)!r} here"
    close = difflib.get_close_matches(name, [*known, *columns], 1)
    return f"instead of {name!r}, did you mean {close[0]!r}?" if close else ""


def _singular(name: str) -> str:
    return next(one for one, many in PLURALS.items() if many == name)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _close(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
