"""The base class of sections, common ranges, and the unit and reason of a setting."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

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


def _tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
# A YAML list, immutable: values are validated strictly, which would refuse a list for a tuple.
ListOf = Annotated[tuple[T, ...], BeforeValidator(_tuple_of)]


def about(why: str, *, unit: str = "") -> JsonDict:
    """Add unit and reason to a setting, for docs/configuration.md and the JSON schema.

    Args:
        why: reason for the default.
        unit: "" for settings without one (names, switches, choices).
    """
    return {"unit": unit, "why": why}


class Section(BaseModel):
    """A section of the configuration: immutable, and without other keys than the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
