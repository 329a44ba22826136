"""What a service reads from its environment: addresses and secrets, nothing else."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from servicekit.errors import ConfigError
from servicekit.redis_client import check_scheme

Port = Annotated[int, Field(ge=0, le=65535)]


class ServiceEnvironment(BaseModel):
    """Environment of a service process; the launcher or the pod sets it."""

    # Inputs stay out of the error texts: REDIS_URL holds a password.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    redis_url: str = Field(alias="REDIS_URL", min_length=1)
    run_id: str = Field(alias="TANDEM_RUN_ID", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    run_dir: Path = Field(alias="TANDEM_RUN_DIR")
    bind_host: str = Field("127.0.0.1", alias="TANDEM_BIND_HOST", min_length=1)
    grpc_port: Port = Field(0, alias="TANDEM_GRPC_PORT")
    metrics_port: Port = Field(0, alias="TANDEM_METRICS_PORT")

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        try:
            check_scheme(url)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return url

    @field_validator("run_dir")
    @classmethod
    def _is_folder(cls, folder: Path) -> Path:
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder")
        return folder

    @property
    def bind(self) -> str:
        """Address for GrpcServer(bind=...)."""
        return f"{self.bind_host}:{self.grpc_port}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "ServiceEnvironment":
        """Raises: ConfigError: naming every variable that is unset or malformed."""
        aliases = [field.alias for field in cls.model_fields.values() if field.alias is not None]
        given = {alias: environ[alias] for alias in aliases if alias in environ}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(dict(each), given) for each in error.errors())) from None


def _problem(error: dict[str, object], given: Mapping[str, str]) -> str:
    location = error["loc"]
    name = str(location[0]) if isinstance(location, tuple) else str(location)
    if error["type"] == "missing":
        return f"environment variable {name} is not set; `tandem run` sets it for the services that it starts"
    shown = "" if name == "REDIS_URL" else f"={given[name]!r}"
    return f"environment variable {name}{shown} is wrong: {error['msg']}"
