"""Loads a user's function in a reward worker, calls it, and checks what it returns.

The coordinator finds the source without importing it: its text is kept for the whole run.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from coordinator.workers.signature import LoggedParts, Signature, Unfit, read_signature
from coordinator.workers.task import Work

# A number, or None, by itself or with parts.
Score = float | None | tuple[float | None, dict[str, float]]
# Characters of an exception's message that are kept.
_MESSAGE_CHARS = 300


def load(
    place: str, function: str, per: str | None, args: Mapping[str, Any], source: Mapping[str, str] | None = None
) -> Work:
    """Import a function and find out how it is called.

    Args:
        place: a .py file, or the name of a module.
        per: "sample", "batch", "group"; None: its signature says it.
        args: values for parameters.
        source: its `file` and the `text` that is imported, whatever the file holds now; None: as the file is.
    Returns: work whose jobs are a sample, a dict by name, or (batch, group) a list of them; `form` says which names.
    Raises: Unfit: it cannot be used; says why.
    """
    module, folder = import_code(place, source)
    code = find_code(module, function, place)
    if not callable(code) or inspect.isclass(code):
        raise Unfit(f"{function} in {place} is {kind_of(code)}, not a function")
    try:
        signature = read_signature(code, per=per, args=args)
    except Unfit as error:
        raise Unfit(f"{function} in {place} {error}") from None
    is_async = inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(getattr(code, "__call__", None))  # noqa: B004
    return Work(
        call=_call_of(code, signature, is_async=is_async),
        is_async=is_async,
        form={
            "per": signature.per,
            "is_async": is_async,
            "values": signature.sent,
            "required": signature.required,
            "optional": [*signature.optional, *signature.lent],
            "assumed": [name for name, optional in signature.borrowed.items() if not optional],
            "everything": signature.everything,
        },
        describe=lambda error: describe(error, folder),
    )


def describe(error: BaseException, folder: str) -> str:
    """Describe an exception: type, message, and the last line of the user's files that it passed.

    Args:
        folder: where the user's files are.
    """
    if isinstance(error, BadScore):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__} of {describe(error.exceptions[0], folder)}"
    text = said(error)
    cut = text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."
    return f"{type(error).__name__}{': ' if cut else ''}{cut}{_place(error, folder)}"


def said(error: BaseException) -> str:
    """Return an exception's message on one line, as Unicode; "": it has none, or its class fails to make it."""
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception:  # noqa: BLE001 - of a user's class
        return ""
    return " ".join(text.split()).encode(errors="replace").decode()


def _place(error: BaseException, folder: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if frame.filename.startswith(folder) and "site-packages" not in frame.filename]
    return f" ({Path(mine[-1].filename).name}:{mine[-1].lineno})" if mine else ""


class BadScore(ValueError):
    """A function returned what is no score."""


def score_of(value: Any) -> Score:
    """Take what a function returned as a score: a number, or a dict with it as `score`, besides parts of any kind.

    Returns: the number; None: the reward does not apply; of a dict with the parts that are numbers, finite or not,
        which the run reports; others are left out.
    Raises: BadScore: it is no score.
    """
    if not isinstance(value, Mapping):
        return None if value is None else number(value)
    if "score" not in value:
        raise BadScore(f"it returned a dict without 'score' ({_listed(value)})")
    found = {str(name): _part(part) for name, part in value.items() if name != "score"}
    score = value["score"]
    return None if score is None else number(score), {name: part for name, part in found.items() if part is not None}


def _part(value: Any) -> float | None:
    """Return a part as a number; None: it is none."""
    value = plain(value)
    try:
        return float(value) if isinstance(value, bool | numbers.Real) else None
    except OverflowError:
        return math.inf


def plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as Python's; any other value as it is."""
    is_scalar = not isinstance(value, bool | int | float) and getattr(value, "shape", None) == ()
    return value.item() if is_scalar and hasattr(value, "item") else value


def number(value: Any) -> float:
    """Take what a function returned as a score: a bool, int or float, of Python, NumPy or torch.

    Raises: BadScore: it is none, or not finite.
    """
    value = plain(value)
    if not isinstance(value, bool | numbers.Real):
        hint = ": declare it `async def`" if inspect.isawaitable(value) else ""
        raise BadScore(f"it returned {kind_of(value)}, not a number{hint}")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise BadScore(f"it returned {score}, which is not finite")
    return score


def scores_of(values: Any, count: int) -> list[Score]:
    """Take what a function returned as the scores of `count` samples. Raises: BadScore: it is something else."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        hint = ": declare it `async def`" if inspect.isawaitable(values) else ""
        raise BadScore(f"it returned {kind_of(values)}, not a list of {count} numbers{hint}")
    if len(values) != count:
        raise BadScore(f"it returned {len(values)} scores for {count} completions")
    return [score_of(value) for value in values]


def _with_parts(scores: list[Score], logged: LoggedParts) -> list[Score]:
    """Add what a function has logged to the scores of its samples."""
    found = list[Score]()
    for place, score in enumerate(scores):
        parts = {name: part for name, value in logged.parts(place).items() if (part := _part(value)) is not None}
        value, own = score if isinstance(score, tuple) else (score, {})
        found.append((value, {**parts, **own}) if parts else score)
    return found


def _call_of(code: Callable[..., Any], signature: Signature, *, is_async: bool) -> Callable[[Any], Any]:
    of_one = signature.per == "sample"
    arguments = signature.arguments if of_one else signature.arguments_of_all

    def scored(given: Any, value: Any, logged: LoggedParts) -> Any:
        found = _with_parts([score_of(value)] if of_one else scores_of(value, len(given)), logged)
        return found[0] if of_one else found

    def called(given: Any) -> Any:
        logged = LoggedParts()
        return scored(given, code(**arguments(given, logged)), logged)

    async def awaited(given: Any) -> Any:
        logged = LoggedParts()
        return scored(given, await code(**arguments(given, logged)), logged)

    return awaited if is_async else called


def import_code(place: str, source: Mapping[str, str] | None) -> tuple[ModuleType, str]:
    """Import a user's code. Returns: the module, and the folder of the user's files. Raises: Unfit.

    Args:
        place, source: as for `load`.
    """
    if place.endswith(".py"):
        return _import_file(Path(place), source), str(Path(place).parent)
    module = _import_module(place, source)
    return module, str(Path(getattr(module, "__file__", None) or place).parent)


class _Kept(SourceFileLoader):
    """Finds and loads one module from a text that was read before; caches no bytecode, because the file may differ."""

    def __init__(self, name: str, source: Mapping[str, str]) -> None:
        super().__init__(name, source["file"])
        self._text = source["text"]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, self.path)


def _import_file(file: Path, source: Mapping[str, str] | None) -> ModuleType:
    if source is None and not file.is_file():
        close = difflib.get_close_matches(file.name, [neighbour.name for neighbour in file.parent.glob("*.py")], 1)
        raise Unfit(f"{file} does not exist{f'; did you mean {close[0]}?' if close else ''}")
    sys.path.insert(0, str(file.parent))
    # A file may be called like a library; under that name it would be found in its place.
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"tandem_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=None if source is None else _Kept(name, source))
    assert spec is not None and spec.loader is not None  # noqa: PT018 - a file that ends with .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importing(str(file), str(file.parent)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str, source: Mapping[str, str] | None) -> ModuleType:
    if source is not None:
        sys.meta_path.insert(0, _Kept(name, source))
    with _importing(name, ""):
        return importlib.import_module(name)


@contextlib.contextmanager
def _importing(what: str, folder: str) -> Iterator[None]:
    try:
        yield
    except SyntaxError as error:
        raise Unfit(
            f"{what} is not Python: {error.msg} ({Path(error.filename or what).name}:{error.lineno})"
        ) from error
    except BaseException as error:
        place = _place(error, folder) if folder else ""
        is_relative = isinstance(error, ImportError) and "relative import" in str(error)
        hint = "; name it as package.module:NAME, to import it within its package" if is_relative and folder else ""
        why = ": ".join(filter(None, (type(error).__name__, said(error))))
        raise Unfit(f"importing {what} failed: {why}{place}{hint}") from error


def find_code(
    module: ModuleType, name: str, place: str, *, alike: Callable[[object], bool] = inspect.isfunction
) -> Any:
    """Return what a module has under a name. Raises: Unfit: it has no such name; suggests those that are `alike`."""
    try:
        return getattr(module, name)
    except AttributeError:
        codes = [code for code in vars(module).values() if alike(code)]
        own = [code.__name__ for code in codes if code.__module__ == module.__name__]
        close = difflib.get_close_matches(name, own, 1)
        things = "classes" if alike is inspect.isclass else "functions"
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(own) or f'no {things}'}"
        raise Unfit(f"{place} has no {name}; {hint}") from None


def _listed(value: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name!r:.40}" for name in list(value)[:5]) or "it is empty"


def kind_of(value: Any) -> str:
    """Name a value's type, with its article, for messages."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def source_file(place: str) -> Path | None:
    """Find the file of own code where a worker process imports it from.

    Args:
        place: a .py file, or the name of a module.
    Returns: the file, which may be missing if it was given by name; None: no module with a source was found.
    """
    if place.endswith(".py"):
        return Path(place)
    top, *rest = place.split(".")
    # The path of a worker begins with its working directory. The other way is that of editable installations.
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    stems = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
    return next((file for file in files if file.is_file()), None)


def read_source(place: str) -> Mapping[str, str] | None:
    """Read own code. Returns: its `file` and `text`; None: it cannot be read, which the import will explain."""
    file = source_file(place)
    try:
        return None if file is None else {"file": str(file), "text": importlib.util.decode_source(file.read_bytes())}
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
