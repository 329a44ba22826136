"""MLflow, by its client: a run of an experiment on a tracking server.

MLflow keeps every figure that it gets for a step, so iterations that a resume repeats keep their first figures.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from coordinator.record.trackers.base import Outcome, RunFacts
from coordinator.record.trackers.completions import COLUMNS, Shown
from tandem_config.sections.trackers import MlflowTracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

# MLflow's own limits of one call.
_PARAMS_PER_CALL, _VALUE_CHARACTERS = 100, 6000
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# The defaults wait minutes for a server that does not answer; a later iteration tries again anyway.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def client_of(tracker: MlflowTracker) -> "MlflowClient":
    """Make a client; a server is not called yet, a local store is opened. Raises: mlflow.MlflowException."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracker.uri)


def allowed(name: str) -> str:
    """Spell a name with the characters that MLflow takes.

    >>> allowed("eval/aime/pass@8")
    'eval/aime/pass_at_8'
    """
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"), flags=re.ASCII)


class MlflowBackend:
    """A run of MLflow."""

    kind = "mlflow"
    rewinds = False
    resends = 0

    def __init__(self, tracker: MlflowTracker, facts: RunFacts) -> None:
        self._tracker, self._facts = tracker, facts
        self._client: MlflowClient | None = None
        self._run_id = ""

    def open(self, run_id: str, after: int) -> tuple[str, str]:
        """Begin a run, or continue it; settings that have changed since its beginning become tags `resumed.<key>`."""
        client = self._client = client_of(self._tracker)
        run_id = run_id or self._run_id  # of an attempt that failed later
        if run_id:
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = client.create_run(self._experiment(client), run_name=self._facts.name).info.run_id
        self._run_id = run_id
        known = client.get_run(run_id).data.params
        texts = {allowed(key): str(value)[:_VALUE_CHARACTERS] for key, value in self._facts.settings.items()}
        self._log_params({key: text for key, text in texts.items() if key not in known})
        for key, text in texts.items():
            if known.get(key, text) != text:
                client.set_tag(run_id, f"resumed.{key}", text)
        return run_id, ""

    def log(self, iteration: int, values: dict[str, float]) -> None:
        """Send the figures in one call."""
        from mlflow.entities import Metric

        assert self._client is not None, "open first"
        now_ms = int(time.time() * 1000)
        metrics = [Metric(allowed(name), value, now_ms, iteration) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, iteration: int, completions: Sequence[Shown]) -> None:
        """Store them as a table, an artifact of the run."""
        assert self._client is not None, "open first"
        table = {"columns": list(COLUMNS), "data": [list(astuple(one)) for one in completions]}
        self._client.log_dict(self._run_id, table, f"completions/{iteration:08}.json")

    def close(self, outcome: Outcome) -> None:
        """End the run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, status=_STATUS[outcome])

    def _experiment(self, client: "MlflowClient") -> str:
        found = client.get_experiment_by_name(self._tracker.experiment)
        name = self._tracker.experiment
        return str(client.create_experiment(name) if found is None else found.experiment_id)

    def _log_params(self, texts: dict[str, str]) -> None:
        from mlflow.entities import Param

        assert self._client is not None, "open first"
        params = [Param(key, text) for key, text in texts.items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])
