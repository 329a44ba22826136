"""A real Prometheus on loopback that scrapes what a test runs, and the dashboards' queries put to it."""

import contextlib
import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kit.processes import free_port
from tests.kit.waiting import until
from tests.monitoring.boards import Query
from tests.monitoring.tools import MONITORING, RULES, tool

READY_S = 60.0
ANSWER_S = 30.0
# Our rules' windows are hours; a test lasts a minute.
WINDOW = "1m"
STAGES_S = 'tandem_weight_sync_seconds_sum{job="coordinator", stage!="total"}'
TOTAL_S = STAGES_S.replace("!=", "=")


class PrometheusApi:
    """The HTTP API of a Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str | float) -> bytes:
        """GET. Raises: OSError: no answer, or (urllib.error.HTTPError) a refusal."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=ANSWER_S) as answer:
            return bytes(answer.read())

    def labels(self, expression: str) -> list[dict[str, str]]:
        """Labels of what a query returns now."""
        return [series["metric"] for series in self._instant(expression)]

    def now(self, expression: str) -> list[float]:
        """Finite values of a query now."""
        values = [float(series["value"][1]) for series in self._instant(expression)]
        return [value for value in values if math.isfinite(value)]

    def _instant(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/api/v1/query", query=expression))["data"]["result"]
        return found

    def rules(self) -> dict[str, str]:
        """Rule to its health ("ok" once it was evaluated)."""
        groups = json.loads(self.get("/api/v1/rules"))["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


class Prometheus(PrometheusApi):
    """One server; `targets` is by job, then by replica name ("" for none): host:port."""

    def __init__(self, folder: Path, targets: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__(f"http://127.0.0.1:{free_port()}")
        self._folder = folder
        self._start_s = time.time()
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(_config(targets)))
        command = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._is_ready, READY_S)

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"prometheus ended: {(self._folder / 'prometheus.log').read_text()}")
        with contextlib.suppress(OSError, urllib.error.URLError):
            return self.get("/-/ready").startswith(b"Prometheus Server is Ready")
        return False

    def values(self, expression: str) -> list[float]:
        """Every finite value of a query over the time since the start. Raises: AssertionError: it was refused."""
        try:
            raw = self.get("/api/v1/query_range", query=expression, start=self._start_s, end=time.time(), step=1)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        found: list[dict[str, Any]] = json.loads(raw)["data"]["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def without_data(self, queries: Sequence[Query]) -> list[Query]:
        """Queries that have returned no number so far."""
        return [query for query in queries if not self.values(query.over(WINDOW))]

    def stages_share(self) -> float:
        """Seconds of all stages of syncs / total seconds, by the last scrape: one may find a round half recorded."""
        return self.values(f"sum ({STAGES_S}) / sum ({TOTAL_S})")[-1]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, Mapping[str, str]]) -> Iterator[Prometheus]:
    """A server for the block."""
    server = Prometheus(folder, targets)
    try:
        yield server
    finally:
        server.close()


def _config(targets: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The jobs of deploy/monitoring/prometheus.yml at other addresses, scraped every second."""
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    configs = []
    for job in (each["job_name"] for each in jobs):
        labelled = [
            {"targets": [address], "labels": {"replica": replica} if replica else {}}
            for replica, address in targets.get(job, {}).items()
        ]
        configs.append({"job_name": job, "static_configs": labelled})
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return {"global": times, "rule_files": [str(RULES)], "scrape_configs": configs}
