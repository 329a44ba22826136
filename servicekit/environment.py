"""The environment of a service: addresses and secrets."""

import asyncio
import os
import uuid
from collections.abc import Mapping
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from servicekit.addresses import (
    ANY,
    LOOPBACK,
    WILDCARDS,
    any_host,
    check_host,
    join_address,
    reached_at,
    split_address,
)
from servicekit.errors import ConfigError
from servicekit.redis.client import TLS_OPTIONS, check_scheme, with_tls_files
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.certificates import CA, CERT, KEY, TlsFiles
from servicekit.security.run_token import VARIABLE
from servicekit.security.tls import Identity

Port = Annotated[int, Field(ge=0, le=65535)]
# Fields of TANDEM_REDIS_CA, _CERT and _KEY.
_REDIS_FILES = ("redis_ca", "redis_cert", "redis_key")


class ServerEnvironment(BaseModel):
    """Environment of any process that serves gRPC: where it listens, and how it and its callers know each other."""

    # Without inputs in errors, because REDIS_URL has a password.
    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    run_token: str = Field(
        "",
        alias=VARIABLE,
        pattern=r"^[\x21-\x7e]{16,256}$|^$",
        description=(
            "Secret that calls to the run's services must carry. `tandem run` makes one. Unset: everyone who reaches a "
            "port may call."
        ),
    )
    bind_host: str = Field(
        "127.0.0.1",
        alias="TANDEM_BIND_HOST",
        min_length=1,
        description="Address to listen on; the default is reachable only from this machine. `*`, as in a pod: every "
        "address of this machine, of IPv4 and IPv6.",
    )
    grpc_port: Port = Field(0, alias="TANDEM_GRPC_PORT", description="Port of the service; 0: a free one, announced.")
    health_port: Port | None = Field(
        None,
        alias="TANDEM_HEALTH_PORT",
        description="Port of a plain gRPC health service, for probes, which cannot do mutual TLS. Unset: none.",
    )
    tls_cert: str = Field(
        "", alias=CERT, description="PEM file: certificate of this service for mutual TLS; all three or none."
    )
    tls_key: str = Field("", alias=KEY, description="PEM file: the key of TANDEM_TLS_CERT.")
    tls_ca: str = Field("", alias=CA, description="PEM file: the trusted authorities.")

    @field_validator("bind_host")
    @classmethod
    def _can_listen(cls, given: str) -> str:
        host = any_host() if given == ANY else check_host(given)
        if host == "::" and any_host() != "::":
            raise ValueError(f"this machine has no IPv6; {ANY} is every address that it has")
        return host

    @field_validator("health_port", mode="before")
    @classmethod
    def _empty_is_none(cls, given: object) -> object:
        return None if given == "" else given

    @property
    def bind(self) -> str:
        """Address for GrpcServer(bind=...)."""
        return join_address(self.bind_host, self.grpc_port)

    @property
    def health_bind(self) -> str | None:
        """Address for GrpcServer(health_bind=...)."""
        return None if self.health_port is None else join_address(self.bind_host, self.health_port)

    def identity(self, role: str) -> Identity | None:
        """Make this process's identity for mutual TLS; None: no TLS. Raises: ConfigError: the files are invalid."""
        files = TlsFiles.of(self.tls_cert, self.tls_key, self.tls_ca)
        return None if files is None else Identity(files, role)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the environment. Raises: ConfigError: with every variable that is unset or malformed."""
        aliases = [field.alias for field in cls.model_fields.values() if field.alias is not None]
        given = {alias: environ[alias] for alias in aliases if alias in environ}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(dict(detail), given) for detail in error.errors())) from None


class ServiceEnvironment(ServerEnvironment):
    """Environment of a service process of a run; the launcher or the pod sets it."""

    # Before redis_url, because they become options of it.
    redis_ca: str = Field("", alias="TANDEM_REDIS_CA", description="PEM file: the authority of a rediss:// server.")
    redis_cert: str = Field(
        "", alias="TANDEM_REDIS_CERT", description="PEM file: certificate of this service, if Redis requires one."
    )
    redis_key: str = Field("", alias="TANDEM_REDIS_KEY", description="PEM file: the key of TANDEM_REDIS_CERT.")
    redis_url: str = Field(
        alias="REDIS_URL",
        min_length=1,
        description="Secret: redis://, rediss:// (TLS) or unix:// with user and password. The run's rendezvous.",
    )
    redis_wait_s: float = Field(
        30.0,
        alias="TANDEM_REDIS_WAIT_S",
        ge=0,
        le=3600,
        description="Seconds that a starting service waits for a Redis that is unreachable or refuses its commands, as "
        "pods start in any order.",
    )
    run_id: str = Field(
        alias="TANDEM_RUN_ID",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="The run's id: its name in Redis, in its folder and in its checkpoints; the same for all services "
        "of a run, and for its restarts.",
    )
    run_dir: Path = Field(
        alias="TANDEM_RUN_DIR",
        description="Folder of the run: checkpoints, metrics, state. Shared by coordinator and trainer, which make it "
        "where the folder above it exists. A folder belongs to one run, by TANDEM_RUN_ID.",
    )
    advertise_host: str = Field(
        "",
        alias="TANDEM_ADVERTISE_HOST",
        validate_default=True,
        description=(
            "Address at which others reach this process, for its record and for weight syncs; of several, with commas, "
            "the first IPv4 address, else the first of IPv6. Unset: TANDEM_BIND_HOST. A pod: status.podIPs."
        ),
    )
    metrics_port: Port = Field(
        0, alias="TANDEM_METRICS_PORT", description="Port of Prometheus's /metrics; 0: a free one, announced."
    )
    worker_id: str = Field(
        "",
        alias="TANDEM_WORKER_ID",
        pattern=r"^([0-9a-f]{32})?$",
        description="Name under which this process leads the run, of no other process ever. `tandem run` makes one, "
        "and gives the lead up in its place when it has seen the process end. Unset: the coordinator makes one.",
    )
    kube_namespace: str = Field(
        "",
        alias="TANDEM_KUBE_NAMESPACE",
        description="Namespace of the pods of fleet.kind kubernetes. Unset: the service account's, or kubeconfig's.",
    )
    rollout_set: str = Field(
        "",
        alias="TANDEM_ROLLOUT_SET",
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
        description="Name of the set of the rollout pods, in place of fleet.rollout_set: where a kustomization's "
        "namePrefix changes it. Unset: fleet.rollout_set.",
    )
    trainer_set: str = Field(
        "",
        alias="TANDEM_TRAINER_SET",
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
        description="Name of the set of the trainer's pods, in place of fleet.trainer_set: where a kustomization's "
        "namePrefix changes it. Unset: fleet.trainer_set.",
    )
    web_port: Port | None = Field(
        None,
        alias="TANDEM_WEB_PORT",
        description="Port of the coordinator's web page, which needs no login. Unset: no page.",
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto",
        alias="TANDEM_DEVICE",
        description="cuda: a trainer or rollout without a GPU refuses to start, instead of training on the CPU, and so "
        "does `tandem run`; cpu: one that sees a GPU refuses, and `tandem run` hides the GPUs. It sets this for "
        "each of its processes.",
    )

    @field_validator("web_port", mode="before")
    @classmethod
    def _empty_port_is_none(cls, given: object) -> object:
        return None if given == "" else given

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str, info: ValidationInfo) -> str:
        files = {name: str(info.data.get(field, "")) for name, field in zip(TLS_OPTIONS, _REDIS_FILES, strict=True)}
        try:
            check_scheme(url)
            return with_tls_files(url, files)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("run_dir")
    @classmethod
    def _is_no_file(cls, folder: Path) -> Path:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder")
        return folder

    @field_validator("advertise_host")
    @classmethod
    def _can_be_reached(cls, given: str, info: ValidationInfo) -> str:
        hosts = given or str(info.data.get("bind_host", LOOPBACK))  # a bind_host that is not there is refused already
        host = reached_at([check_host(name.strip()) for name in hosts.split(",")])
        if host in WILDCARDS:
            raise ValueError(
                f"{host} is an address to listen on (TANDEM_BIND_HOST), not to connect to: set "
                "TANDEM_ADVERTISE_HOST to the address of this process, in a pod to status.podIPs"
            )
        if ":" in host and IPv6Address(host).is_link_local:
            raise ValueError(f"{host} is of one link (fe80::/10); give another address of this machine")
        return host

    def advertised(self, bound: str | int) -> str:
        """Return the address `host:port` at which others reach a bound address or port of this process."""
        return join_address(self.advertise_host, bound if isinstance(bound, int) else split_address(bound)[1])

    def record(self, role: str, name: str, address: str, metrics_port: int, worker_id: str = "") -> ServiceRecord:
        """Make the record of this process, whose server has bound `address`. worker_id: "": a new one."""
        return ServiceRecord(
            role=role,
            name=name,
            address=self.advertised(address),
            metrics_address=self.advertised(metrics_port),
            worker_id=worker_id or uuid.uuid4().hex,
        )

    async def open_registry(self, settings: AgreedSettings | None = None) -> Registry:
        """Connect to the run's registry, in a thread. Raises: ConfigError, Unavailable: see Registry."""
        wait_s = self.redis_wait_s
        return await asyncio.to_thread(Registry, self.redis_url, self.run_id, wait_s=wait_s, settings=settings)


def _problem(error: dict[str, object], given: Mapping[str, str]) -> str:
    location = error["loc"]
    name = str(location[0]) if isinstance(location, tuple) else str(location)
    if error["type"] == "missing":
        return f"environment variable {name} is not set; `tandem run` sets it for the services that it starts"
    shown = f"={given[name]!r}" if name in given and name not in ("REDIS_URL", VARIABLE) else ""
    return f"environment variable {name}{shown} is wrong: {error['msg']}"


def whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number from the environment. Raises: ConfigError: it is none."""
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise ConfigError(f"environment variable {name}={environ[name]!r} is not a whole number") from None
