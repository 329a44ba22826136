"""What Grafana is given at its start: it finds every file, knows every key, and reaches the Prometheus beside it.

No Grafana can be installed from where this was made, so its documentation of provisioning stands in for it:
https://grafana.com/docs/grafana/v11.6/administration/provisioning/
"""

from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.house.repository import REPO
from tests.images.compose import resolved, service
from tests.monitoring.boards import FILES, board, panels
from tests.monitoring.tools import DASHBOARDS, MONITORING

PROVISIONING = MONITORING / "grafana" / "provisioning"
# Where the image looks for it (GF_PATHS_PROVISIONING), and the folders that it reads there.
TARGET = "/etc/grafana/provisioning"
READ = {"access-control", "alerting", "dashboards", "datasources", "plugins"}
# Of one entry; Grafana ignores what it does not know, so a slip would be silent.
DATASOURCE_KEYS = {
    *("name", "uid", "type", "access", "orgId", "url", "user", "database", "basicAuth", "basicAuthUser"),
    *("withCredentials", "isDefault", "jsonData", "secureJsonData", "editable", "version"),
}
PROVIDER_KEYS = {
    *("name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds"),
    *("allowUiUpdates", "options"),
}
PROVIDER_OPTIONS = {"path", "foldersFromFilesStructure"}


def entries(kind: str, key: str) -> list[dict[str, Any]]:
    """The entries of every file of a folder of provisioning."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (PROVISIONING / kind).iterdir()]
    assert all(file.keys() == {"apiVersion", key} and file["apiVersion"] == 1 for file in files)
    return [entry for file in files for entry in file[key]]


def mounted_from(target: str) -> Path:
    """The folder of this repository that the compose file mounts at `target`."""
    mounts = [resolved(mount).split(":") for mount in service("grafana")["volumes"]]
    (source,) = [source for source, there, *_ in mounts if there == target]
    return (REPO / source).resolve()


def test_the_files_are_where_grafana_looks() -> None:
    assert mounted_from(TARGET) == PROVISIONING
    assert {path.name for path in PROVISIONING.iterdir()} <= READ
    assert {path.suffix for path in PROVISIONING.rglob("*") if path.is_file()} == {".yaml"}


def test_every_dashboard_is_provided() -> None:
    (provider,) = entries("dashboards", "providers")
    assert provider.keys() <= PROVIDER_KEYS
    assert provider["options"].keys() <= PROVIDER_OPTIONS
    assert provider["type"] == "file"
    assert mounted_from(provider["options"]["path"]) == DASHBOARDS
    assert sorted(path.name for path in DASHBOARDS.iterdir()) == sorted(FILES)


def test_the_datasource_is_the_prometheus_of_the_project() -> None:
    (source,) = entries("datasources", "datasources")
    assert source.keys() <= DATASOURCE_KEYS
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    address = urlsplit(source["url"])
    published = [resolved(port).rpartition(":")[2] for port in service(str(address.hostname))["ports"]]
    assert published == [str(address.port)]
    assert service(str(address.hostname))["image"].startswith("prom/prometheus:")
    assert address.hostname in service("grafana")["depends_on"]


@pytest.mark.parametrize("file", FILES)
def test_panels_ask_the_datasource_that_is_chosen(file: str) -> None:
    """Of a variable that offers every Prometheus: the default one is taken, whatever its name."""
    shown = board(file)
    (variable,) = [each for each in shown["templating"]["list"] if each["type"] == "datasource"]
    assert variable["query"] == "prometheus"
    wanted = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    for panel in panels(file):
        assert [part["datasource"] for part in (panel, *panel["targets"])] == [wanted] * (1 + len(panel["targets"]))


def test_no_mount_lies_inside_another() -> None:
    """Docker would make a folder in a volume that Grafana's user could not write to."""
    targets = [PurePosixPath(resolved(mount).split(":")[1]) for mount in service("grafana")["volumes"]]
    assert [(inner, outer) for inner in targets for outer in targets if outer in inner.parents] == []
