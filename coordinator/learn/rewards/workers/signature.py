"""Runs in a reward worker: which parameters of a user's function get what.

| name                                   | value                                                                 |
|----------------------------------------|-----------------------------------------------------------------------|
| `prompt`, `completion`, `answer`       | texts                                                                 |
| `columns`                              | all columns of the data's row, a dict                                 |
| `num_tokens`                           | tokens of the completion                                              |
| `truncated`, `finish_reason`           | whether the length limit cut it off; "length" or "stop"               |
| `sample_id`                            | as in errors and logs: i12.g3.row77#5                                 |
| a name in `args` of the configuration  | its value                                                             |
| the name of a column                   | the row's value                                                       |

For a batch or a group each of them is a list, and the names are plural: `prompts`, `completions`, `answers`,
`finish_reasons`, `sample_ids`; the others keep theirs.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
}
# Names that other trainers give to these values, for the message.
_ELSEWHERE = {
    "prompt_str": "prompt",
    "solution_str": "completion",
    "solution_strs": "completions",
    "response": "completion",
    "responses": "completions",
    "ground_truth": "answer",
    "ground_truths": "answers",
    "solution": "answer",
    "solutions": "answers",
    "label": "answer",
    "labels": "answers",
    "extra_info": "columns",
    "extra_infos": "columns",
    "sample": "columns",
}
# Names that other trainers fill and that nothing stands for here.
_NOT_HERE = ("data_source", "data_sources", "completion_ids", "completions_ids", "prompt_ids", "trainer_state")


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
    """

    per: str
    values: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    everything: bool
    args: Mapping[str, Any]

    def arguments(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call for one sample. Raises: KeyError: its row lacks a column."""
        columns = sample.get("columns", {})
        found = {name: columns[name] for name in self._wanted(columns) if name in columns}
        _demand(self.required, found)
        return {**found, **self.args, **{name: sample[name] for name in self.values}}

    def arguments_of_all(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the arguments of a call for several samples: lists; None where a row lacks a column.

        Raises: KeyError: every row lacks a column.
        """
        rows = [sample.get("columns", {}) for sample in samples]
        present = dict.fromkeys(name for row in rows for name in row)
        found = {name: [row.get(name) for row in rows] for name in self._wanted(present) if name in present}
        _demand(self.required, found)
        values = {PLURALS[name]: [sample[name] for sample in samples] for name in self.values}
        return {**found, **self.args, **values}

    def _wanted(self, columns: Mapping[str, Any]) -> Sequence[str]:
        return list(columns) if self.everything else [*self.required, *self.optional]


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
    _check_number(named, names, per)
    further = [parameter for name, parameter in named.items() if name not in names and name not in args]
    values = list(names.values()) if everything else [names[name] for name in named if name in names]
    return Signature(
        per=per,
        values=tuple(values),
        required=tuple(parameter.name for parameter in further if parameter.default is parameter.empty),
        optional=tuple(parameter.name for parameter in further if parameter.default is not parameter.empty),
        everything=everything,
        args={name: value for name, value in args.items() if everything or name in named},
    )


def _guess(named: Mapping[str, Any]) -> str:
    """Return "batch" if a parameter has the name of a list, else "sample"."""
    plurals = [name for name in named if name in PLURALS.values() and name not in PLURALS]
    singulars = [name for name in named if name in PLURALS and name not in PLURALS.values()]
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

    >>> unfilled(["solution_str", "level", "hint"], ["prompt", "level"], "sample")
    "takes 'solution_str', 'hint', which nothing fills ('solution_str' is called 'completion' here). Names that can be \
used: prompt, completion, answer, columns, num_tokens, truncated, finish_reason, sample_id; the data's columns: \
prompt, level; those in args"
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
