"""Which part of an engine a host runs, which interface its ranks use."""

from dataclasses import dataclass

import pytest

from rollout_service.hosts.host_ranks import HOST_INDEX, HostRanks, process_name
from rollout_service.local_hosts import host_environments
from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig
from weightsync.transfer.communicators.interfaces import address_of, interface_of


def config(nodes: int) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"tensor_parallel": 8, "nodes": nodes}}
    )


def test_the_hosts_share_all_ranks_without_overlap() -> None:
    shares = [HostRanks.of(config(4), {HOST_INDEX: str(host)}) for host in range(4)]
    assert [rank for share in shares for rank in share.ranks] == list(range(8))
    assert HostRanks.of(config(1), {}).ranks == range(8)
    assert HostRanks.of(config(4), {HOST_INDEX: ""}).host == 0


@pytest.mark.parametrize(
    ("nodes", "index", "said"),
    [(2, "2", "an engine spans 2 hosts"), (1, "1", "TANDEM_HOST_INDEX=1"), (2, "-1", "0 to 1"), (2, "b", "'b'")],
)
def test_a_host_that_there_is_not_is_refused(nodes: int, index: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HostRanks.of(config(nodes), {HOST_INDEX: index})


def test_the_leader_has_the_replicas_name() -> None:
    assert process_name("rollout-3", {}) == process_name("rollout-3", {HOST_INDEX: "0"}) == "rollout-3"
    assert process_name("rollout-3", {HOST_INDEX: "2"}) == "rollout-3-host-2"


@dataclass(frozen=True)
class Address:
    address: str


INTERFACES = {
    "lo": [Address("127.0.0.1")],
    "eth0": [Address("fe80::1%eth0"), Address("10.1.2.3"), Address("02:fc:00:00:00:01"), Address("fd00::5")],
}


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.1.2.3", "eth0"), ("fd00::5", "eth0"), ("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("::1", "lo")],
)
def test_an_address_leads_to_its_interface(address: str, name: str) -> None:
    assert interface_of(address, INTERFACES) == name


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"10\.1\.2\.4 \(TANDEM_ADVERTISE_HOST\)"):
        interface_of("10.1.2.4", INTERFACES)
    with pytest.raises(ConfigError, match=r"fd00::6 \(TANDEM_ADVERTISE_HOST\)"):
        interface_of("fd00::6", INTERFACES)
    with pytest.raises(ConfigError, match=r"TANDEM_ADVERTISE_HOST=no\.such\.host\.invalid"):
        address_of("no.such.host.invalid")


def test_hosts_of_one_machine_divide_its_gpus() -> None:
    found = host_environments(2, {"CUDA_VISIBLE_DEVICES": "2,3,6,7"})
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["2,3", "6,7"]
    assert host_environments(2, {"CUDA_VISIBLE_DEVICES": ""}) == [{HOST_INDEX: "0"}, {HOST_INDEX: "1"}]
