"""The base class of sections, common ranges, and the unit and reason of a setting."""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.config import JsonDict
from pydantic_core import CoreSchema

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
# As a request may contain (servicekit/rpc/request_bounds.py); a day is longer than any round.
RoundSeconds = Annotated[float, Field(ge=0.001, le=86_400)]
# As a rollout service takes them (rollout_service/sampling.py). Below the lowest temperature SGLang treats it as 0; far
# above the highest sampling is uniform.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 100.0
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]
NewTokens = Annotated[int, Field(gt=0, le=2**24)]
MessageMib = Annotated[float, Field(ge=2**-8, le=2**16)]
Fraction = Annotated[float, Field(ge=0, le=1)]


T = TypeVar("T")
# A YAML list, immutable: values are validated strictly, which would refuse a list for a tuple.
ListOf = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class NumberBounds(TypedDict, total=False):
    """The range of a number: more than, at least, less than, at most."""

    gt: float
    ge: float
    lt: float
    le: float


@overload
def setting(default: EllipsisType, why: str, unit: str = "", **bounds: Unpack[NumberBounds]) -> Any: ...
@overload
def setting(default: T, why: str, unit: str = "", **bounds: Unpack[NumberBounds]) -> T: ...
@overload
def setting(*, factory: Callable[[], T], why: str) -> T: ...
def setting(
    default: Any = ..., why: str = "", unit: str = "", *, factory: Any = None, **bounds: Unpack[NumberBounds]
) -> Any:
    """Declare a setting; the docstring below it is its description in messages and in docs/configuration.md.

    Args:
        default: `...` for a setting that a user must give.
        why: reason for the default.
        unit: "" for settings without one (names, switches, choices).
        factory: makes the default, in place of `default`.
    """
    about: JsonDict = {"unit": unit, "why": why}
    if factory is not None:
        return Field(default_factory=factory, json_schema_extra=about)
    return Field(default, json_schema_extra=about, **bounds)


@functools.cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of settings, by class and name; pydantic's own search takes five times as long."""
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    return {node.name: dict(_described(node)) for node in classes}


def _described(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting of a class that a docstring follows, and that as one line."""
    for declared, text in itertools.pairwise(node.body):
        if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name) and isinstance(text, ast.Expr):
            yield declared.target.id, " ".join(str(ast.literal_eval(text.value)).split())


class Section(BaseModel):
    """A section of the configuration: immutable, and without other keys than the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /) -> CoreSchema:
        """Give the fields their descriptions, before their schema is made of them."""
        for name, description in _docstrings(cls.__module__).get(cls.__name__, {}).items():
            cls.__pydantic_fields__[name].description = description
        return handler(source)
