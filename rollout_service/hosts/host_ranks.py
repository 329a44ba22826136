"""Which part of an engine a process runs: pure, from the configuration and TANDEM_HOST_INDEX."""

import dataclasses
from collections.abc import Mapping

from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig

HOST_INDEX = "TANDEM_HOST_INDEX"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRanks:
    """One host's part of an engine.

    host: 0 is the leader. store: `host:port` of the TCP store where the ranks of several hosts find each other; "" on
    one host, and until the hosts have met.
    """

    host: int = 0
    nodes: int = 1
    tensor_parallel: int = 1
    store: str = ""

    @classmethod
    def of(cls, config: RunConfig, environ: Mapping[str, str]) -> "HostRanks":
        """The part that this process is to run.

        Raises: ConfigError: TANDEM_HOST_INDEX is no number, or no host of the engine.
        """
        nodes = config.rollout.nodes
        try:
            host = int(environ.get(HOST_INDEX, "") or 0)
        except ValueError:
            raise ConfigError(f"environment variable {HOST_INDEX}={environ[HOST_INDEX]!r} is no whole number") from None
        if not 0 <= host < nodes:
            raise ConfigError(f"{HOST_INDEX}={host}: an engine spans {nodes} hosts (rollout.nodes), 0 to {nodes - 1}")
        return cls(host=host, nodes=nodes, tensor_parallel=config.rollout.tensor_parallel)

    @property
    def ranks(self) -> range:
        """The tensor-parallel ranks on this host, as SGLang deals them out: neighbours, as many on each host.

        >>> HostRanks(host=1, nodes=2, tensor_parallel=4).ranks
        range(2, 4)
        """
        each = self.tensor_parallel // self.nodes
        return range(self.host * each, (self.host + 1) * each)

    def meeting_at(self, store: str) -> "HostRanks":
        """The same part, once the store is known."""
        return dataclasses.replace(self, store=store)


def worker_name(replica: str, host: int) -> str:
    """Name of the process that runs a further host of a replica's engine; the first one has the replica's name.

    >>> worker_name("rollout-0", 1)
    'rollout-0-host-1'
    """
    return f"{replica}-host-{host}"


def process_name(replica: str, environ: Mapping[str, str]) -> str:
    """What this process is called in logs and failure records, however wrong its environment is."""
    host = environ.get(HOST_INDEX, "")
    return replica if host in ("", "0") else f"{replica}-host-{host}"
