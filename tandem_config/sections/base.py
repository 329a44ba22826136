"""What every section has in common: its base, the usual ranges, and what a setting says about itself."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
# What a request may say (servicekit/rpc/request_bounds.py); a day is longer than any round.
RoundSeconds = Annotated[float, Field(ge=0.001, le=86_400)]
MessageMib = Annotated[float, Field(ge=2**-8, le=2**16)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def about(why: str, *, unit: str = "") -> JsonDict:
    """What a setting says beside its description: docs/configuration.md and the JSON schema show it.

    Args:
        why: why the default is what it is.
        unit: "" for what has none (names, switches, choices).
    """
    return {"unit": unit, "why": why}


class Section(BaseModel):
    """A part of the configuration: immutable, and no key but the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
