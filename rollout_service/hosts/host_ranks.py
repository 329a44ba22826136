"""The ranks of an engine that a process runs, from the configuration and TANDEM_HOST_INDEX."""

import dataclasses
from collections.abc import Mapping

from servicekit.errors import ConfigError
from servicekit.redis.records import AgreedSettings
from tandem_config.comparing.agreeing import settings_of_an_engine
from tandem_config.schema import RunConfig

HOST_INDEX = "TANDEM_HOST_INDEX"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRanks:
    """One host's part of an engine.

    Attributes:
        host: index of the host; 0 is the leader.
        nodes: number of hosts.
        tensor_parallel: number of ranks on all hosts.
        store: `host:port` of the TCP store where the ranks of several hosts meet; "" on one host, and until the leader
            has joined the others.
        settings: of the engine, as this host has read them (AgreedSettings.to_json); "": not compared.
    """

    host: int = 0
    nodes: int = 1
    tensor_parallel: int = 1
    store: str = ""
    settings: str = ""

    @classmethod
    def of(cls, config: RunConfig, environ: Mapping[str, str]) -> "HostRanks":
        """Make the part that this process runs.

        Raises: ConfigError: TANDEM_HOST_INDEX is not a number, or not a host of the engine.
        """
        nodes = config.rollout.nodes
        try:
            host = int(environ.get(HOST_INDEX, "") or 0)
        except ValueError:
            raise ConfigError(
                f"environment variable {HOST_INDEX}={environ[HOST_INDEX]!r} is not a whole number"
            ) from None
        if not 0 <= host < nodes:
            raise ConfigError(f"{HOST_INDEX}={host}: an engine spans {nodes} hosts (rollout.nodes), 0 to {nodes - 1}")
        settings = AgreedSettings(settings_of_an_engine(config)).to_json()
        return cls(host=host, nodes=nodes, tensor_parallel=config.rollout.tensor_parallel, settings=settings)

    @property
    def ranks(self) -> range:
        """The tensor-parallel ranks on this host, as SGLang assigns them: consecutive, equally many on each host.

        >>> HostRanks(host=1, nodes=2, tensor_parallel=4).ranks
        range(2, 4)
        """
        per_host = self.tensor_parallel // self.nodes
        return range(self.host * per_host, (self.host + 1) * per_host)

    def meeting_at(self, store: str) -> "HostRanks":
        """Return the same part with the address of the store."""
        return dataclasses.replace(self, store=store)


def worker_name(replica: str, host: int) -> str:
    """Name the process that runs a further host of a replica's engine; the leader has the replica's name.

    >>> worker_name("rollout-0", 1)
    'rollout-0-host-1'
    """
    return f"{replica}-host-{host}"


def process_name(replica: str, environ: Mapping[str, str]) -> str:
    """Name this process for logs and failure records, even if its environment is invalid."""
    host = environ.get(HOST_INDEX, "")
    return replica if host in ("", "0") else f"{replica}-host-{host}"
